"""Checks the quantizers that follow a pruning in the recipe, before anything is calibrated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils import match_named_modules
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.expert_blocks import ExpertBlock, linears_that_must_stay, projections
from moe_coverage_plugin.manifest import CoverageError


def check_quantizers(
    model: PreTrainedModel, blocks: Sequence[ExpertBlock], modifiers: Sequence[Modifier], block_size: int
) -> None:
    """Refuse quantizers whose result could not be served.

    Args:
        modifiers: what follows the pruning in the recipe; those that do not quantize are passed over.
        block_size: channels that every width will be a multiple of.

    Raises:
        CoverageError: a router or the gate of shared experts is quantized; a layer's experts are not all quantized by
            one scheme; or a group of weights would not fit the widths.
    """
    forbidden = linears_that_must_stay(blocks)
    for modifier in modifiers:
        if not isinstance(modifier, QuantizationMixin):
            continue
        name = type(modifier).__name__
        scheme_of = _schemes(model, modifier)
        if touched := next((forbidden[module] for module in scheme_of if module in forbidden), None):
            pattern = f"re:.*{touched.rpartition('.')[2]}$"
            raise CoverageError(
                f'{name} would quantize {touched}, which decides routing: add "{pattern}" to its ignore'
            )
        for block in blocks:
            _check_block(name, block, scheme_of, block_size)


def _schemes(model: PreTrainedModel, modifier: QuantizationMixin) -> dict[Module, QuantizationScheme]:
    config = modifier.resolve_quantization_config()
    schemes: dict[Module, QuantizationScheme] = {}
    for scheme in config.config_groups.values():
        assert isinstance(scheme, QuantizationScheme)
        for _, module in match_named_modules(model, scheme.targets, modifier.ignore):
            schemes.setdefault(module, scheme)
    return schemes


def _check_block(name: str, block: ExpertBlock, scheme_of: dict[Module, QuantizationScheme], block_size: int) -> None:
    linears = [linear for mlp in block.mlps for linear in projections(mlp).values()]
    found = {id(scheme_of.get(linear)): scheme_of.get(linear) for linear in linears}
    if len(found) > 1:
        quantized = sum(linear in scheme_of for linear in linears)
        raise CoverageError(
            f"{name} quantizes {quantized} of {len(linears)} expert projections of {block.name}, or by several "
            "schemes: engines need one scheme for all experts of a layer, so let targets and ignore match all of them "
            "or none"
        )
    scheme = next(iter(found.values()))
    group_size = scheme.weights.group_size if scheme is not None and scheme.weights is not None else None
    if group_size is None or group_size <= 0:  # not in groups, or one for the whole row
        return
    hidden_size = linears[0].in_features
    if hidden_size % group_size:
        raise CoverageError(
            f"{name} has group_size {group_size}, which does not divide the hidden size {hidden_size}: choose one "
            f"that does, for instance {math.gcd(group_size, hidden_size)}"
        )
    if block_size % group_size:
        raise CoverageError(
            f"{name} has group_size {group_size} but widths will be multiples of {block_size}: add "
            f"AlignmentModifier(block_size=...) with a multiple of {group_size} before ChannelPruningModifier"
        )
