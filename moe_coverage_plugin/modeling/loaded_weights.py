"""Checks that every weight of a model has a value from its source: a patch around transformers 5.17.

``from_pretrained`` logs which tensors were missing or not used, gives missing ones random values, and keeps no record
of them. A run would score and compress the random values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import transformers.conversion_mapping as conversion_mapping
from compressed_tensors.offload import OffloadCache, disable_onloading
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.files.mtp import is_mtp_name
from moe_coverage_plugin.manifest import CoverageError

RECORD = "_moe_coverage_loading"
CORRECTION_BIAS = "e_score_correction_bias"
# set by transformers on each tensor that it read from a file
FROM_FILE = "_is_hf_initialized"
SHOWN = 3


class Loading(NamedTuple):
    """What ``from_pretrained`` found in the files of a model.

    Attributes:
        missing: parameters, and correction biases of routers, that no tensor of the files gave a value.
        unused: tensors of the files that the model does not have.
        converted: whether conversions of tensors were registered for the family in this process.
    """

    missing: list[str]
    unused: list[str]
    converted: bool = False


def record_loading() -> None:
    """Let ``from_pretrained`` keep a record of missing and unused tensors at the models that it opens from now on."""
    original = PreTrainedModel._finalize_model_loading
    if hasattr(original, RECORD):
        return

    def finalize(model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
        info = original(model, load_config, loading_info)
        # after the original, which takes out tied and ignored tensors
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        missing = [
            name
            for name in sorted(info.missing_and_mismatched())
            if name in parameters or name.endswith(CORRECTION_BIAS)
        ]
        config = model.config.to_dict()
        # scales of a source that is decompressed while it is opened have no place in the model
        unused = [] if load_config.hf_quantizer is not None else sorted(info.unexpected_keys)
        unused = [name for name in unused if not is_mtp_name(name, config)]
        converted = model.config.model_type in conversion_mapping.USER_REGISTERED_MAPPINGS
        setattr(model, RECORD, Loading(missing, unused, converted))
        return info

    setattr(finalize, RECORD, True)
    # patch: loading-record
    PreTrainedModel._finalize_model_loading = staticmethod(finalize)


def check_loaded(model: PreTrainedModel, routers: Iterable[Module] = ()) -> None:
    """Check that the files of a model filled it, and that the model uses all of them.

    A model that was not opened from files passes. Of a model that was opened before this package was imported, only
    the routers are checked.

    Args:
        model: of a run, with its experts in any form.
        routers: of its MoE layers.

    Raises:
        CoverageError: names missing or unused tensors.
    """
    source, kind = model.name_or_path or "the source", type(model).__name__
    loading = getattr(model, RECORD, None) or Loading(_unfilled_routers(model, routers), [])
    if loading.missing:
        instead = f", and its files have {_some(loading.unused)} instead" if loading.unused else ""
        remedy = "download the model again, or give its tensors the names of this class"
        if loading.converted and all(".experts." in name for name in loading.missing):
            remedy = (
                "open it in another process, because load_quantizable_moe() of llm-compressor has changed how this "
                "one reads the family"
            )
        raise CoverageError(
            f"{source} has no values for {_some(loading.missing)} of {kind}, which are random{instead}: {remedy}"
        )
    if loading.unused:
        raise CoverageError(
            f"{source} has {_some(loading.unused)}, which {kind} does not use, so a part of the model would be left "
            "out: open it with the class and the config that it was saved with, or remove these tensors from it"
        )


def check_finite(model: PreTrainedModel) -> None:
    """Check that no weight is NaN or infinite, as after a broken download; reads every weight once.

    Weights that are offloaded to files are left out; their activations are checked during calibration.

    Raises:
        CoverageError: names the first such tensor.
    """
    with disable_onloading():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta or not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
                continue
            # both are NaN if any value is, and need no copy of the tensor
            if all(bool(limit.isfinite()) for limit in torch.aminmax(tensor.detach())):
                continue
            bad = ~tensor.detach().isfinite()
            if name.endswith(CORRECTION_BIAS):
                # experts that an earlier run removed
                bad &= tensor.detach() != float("-inf")
            if count := int(bad.sum()):
                raise CoverageError(
                    f"{name} of {model.name_or_path or type(model).__name__} has {count} NaN or infinite values of "
                    f"{tensor.numel()}: the file is damaged or was written by a run that diverged, download it again "
                    "or use another checkpoint"
                )


def _unfilled_routers(model: PreTrainedModel, routers: Iterable[Module]) -> list[str]:
    """Parameters of routers without the mark of transformers, if others of the model have it."""
    if not model.name_or_path or not any(hasattr(parameter, FROM_FILE) for parameter in model.parameters()):
        return []
    modules = [module for router in routers for module in router.modules()]
    # offloading replaces parameters
    inside = {
        parameter
        for module in modules
        if not isinstance(module._parameters, OffloadCache)
        for parameter in module.parameters(recurse=False)
    }
    return [name for name, each in model.named_parameters() if each in inside and not hasattr(each, FROM_FILE)]


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return f"{', '.join(names[:SHOWN])}{f' and {more} more' if more > 0 else ''}"
