"""Names of expert projections in the checkpoints of a model family, ``w1`` for ``gate_proj`` and so on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import transformers.modeling_utils as modeling_utils
from llmcompressor.modeling.moe.conversion_mappings import set_save_conversion_mapping
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from moe_coverage_plugin.modeling.expert_lists import ListedExperts

# the projections that a family merges into one tensor in memory, in the order of the conversion's sources
MERGED = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
# in renamings of single experts
NUMBERED = r"experts\.(\d+)"


def keep_family_names(model: PreTrainedModel) -> None:
    """Make the model save experts one by one under the names that checkpoints of its family use.

    Stock engines look for no other names, and some start with random experts if they find none.
    """
    transforms: list[WeightTransform] = []
    prefixed = any(isinstance(used, PrefixChange) for used in getattr(model, "_weight_conversions", None) or ())
    for transform in get_model_conversion_mapping(model, add_legacy=False):
        if isinstance(transform, PrefixChange) and not prefixed:
            continue  # the checkpoint that the model was loaded from had no prefix
        transforms += _renamings(transform) if _merges_experts(transform) else [transform]
    # patch: expert-names
    set_save_conversion_mapping(model, transforms)


@contextmanager
def fast_renaming() -> Iterator[None]:
    """Let transformers rename tensors of models whose conversions only rename, in the same order as always.

    It compiles a regular expression for each tensor, of which a quantized model has tens of thousands.
    """
    saving: Any = modeling_utils
    revert = saving.revert_weight_conversion

    def rename_or_revert(model: PreTrainedModel, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        conversions = getattr(model, "_weight_conversions", None)
        if conversions is None or not all(isinstance(each, WeightRenaming) for each in conversions):
            return revert(model, state_dict)
        renamings: Any = [each.reverse_transform() for each in reversed(conversions)]
        names = sorted(state_dict, key=dot_natural_key)
        renamed = {rename_source_key(name, renamings, [], reverse=True)[0]: state_dict[name] for name in names}
        # tensors of one name are for transformers to merge or to report
        return renamed if len(renamed) == len(names) else revert(model, state_dict)

    # patch: fast-renaming
    saving.revert_weight_conversion = rename_or_revert
    try:
        yield
    finally:
        saving.revert_weight_conversion = revert


def stores_single_experts(model: PreTrainedModel) -> bool:
    """Return whether checkpoints of the family store experts one by one, as ours do.

    Stock transformers does not look for single experts of other families: it starts with random ones.
    """
    transforms = get_model_conversion_mapping(model, add_legacy=False)
    # the toolkit's own loading replaces the conversions by renamings of numbered experts, for the entire process
    if any(_merges_experts(each) or NUMBERED in each.source_patterns[0] for each in transforms):
        return True
    return any(isinstance(module, ListedExperts) for module in model.modules())


def _merges_experts(transform: WeightTransform) -> TypeGuard[WeightConverter]:
    # "*" matches the number of an expert
    merges = isinstance(transform, WeightConverter) and "*" in transform.source_patterns[0]
    return merges and "experts" in transform.target_patterns[0]


def _renamings(converter: WeightConverter) -> list[WeightTransform]:
    projections = MERGED.get(converter.target_patterns[0].rpartition(".")[2], ())
    renamings: list[WeightTransform] = []
    for source, projection in zip(converter.source_patterns, projections, strict=False):
        found = re.search(r"experts\\?\.[^A-Za-z]*\.(\w+)\\?\.weight", source)
        if found is not None and found[1] != projection:
            renamings.append(WeightRenaming(rf"\.experts\.(\d+)\.{found[1]}\.", rf".experts.\1.{projection}."))
    return renamings
