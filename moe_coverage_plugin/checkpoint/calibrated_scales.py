"""Scales that a quantizer leaves without a value, because no calibration token reached their module."""

from __future__ import annotations

import math
from functools import wraps

import torch
from compressed_tensors.offload import disable_onloading, update_offload_parameter
from compressed_tensors.quantization import QuantizationStatus
from llmcompressor.modifiers.quantization import QuantizationMixin
from loguru import logger
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.checkpoint.binding import RECORD
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import MoELayer, find_moe_layers, projections

SCALES = ("weight_scale", "input_scale", "output_scale", "q_scale", "k_scale", "v_scale", "weight_global_scale")
ZERO_POINT = {"input_scale": "input_zero_point", "output_scale": "output_zero_point"}
MARKS = "_marks_scales"
# larger scales are not calibrated values but what was in the memory before
LARGEST_SCALE = 1e9


def watch_quantizers() -> None:
    """Mark the scales of pruned models whenever a quantizer of the toolkit adds them, also without our modifiers."""
    initialize = QuantizationMixin.initialize_quantization
    if hasattr(initialize, MARKS):
        return

    @wraps(initialize)
    def initialize_and_mark(self: QuantizationMixin, model: Module) -> None:
        initialize(self, model)
        if RECORD in vars(model):
            mark_scales(model)

    setattr(initialize_and_mark, MARKS, True)
    # patch: unmarked-scales
    QuantizationMixin.initialize_quantization = initialize_and_mark  # type: ignore[method-assign]


@torch.no_grad()
def mark_scales(model: Module) -> None:
    """Fill the scales of quantizers that have not run yet with NaN, so that those never calibrated are recognized.

    The toolkit leaves them as allocated, which may look like a scale.
    """
    for module in model.modules():
        if getattr(module, "quantization_status", None) != QuantizationStatus.INITIALIZED:
            continue
        for name, scale in _scales(module):
            if not scale.is_meta:
                update_offload_parameter(module, name, torch.full_like(scale, math.nan))


@torch.no_grad()
def complete_scales(model: PreTrainedModel) -> None:
    """Give experts that no calibration token reached the largest scale of the other experts, and check all scales.

    Engines use the largest scale of activations of all experts of a layer, so that what they compute does not change.

    Raises:
        CoverageError: a scale has no usable value; names the module and the remedy.
    """
    filled = [
        f"{layer.name}.{index}"
        for layer in find_moe_layers(model)
        for name in ZERO_POINT
        for index in _fill(layer, name)
    ]
    if experts := dict.fromkeys(filled):
        logger.warning(
            f"No calibration token reached {len(experts)} experts ({', '.join(list(experts)[:3])} ...): their scales "
            "of activations are the largest of their layers, calibrate on more text or with "
            "moe_calibrate_all_experts=True to measure them"
        )
    for path, module in model.named_modules():
        for name, scale in _scales(module):
            if not scale.is_meta and not _usable(scale):
                raise CoverageError(
                    f"{path}.{name} is {float(scale.flatten()[0]):g}, because no calibration token reached it: "
                    "calibrate on more samples, with moe_calibrate_all_experts=True, or add it to the quantizer's "
                    "ignore"
                )


def _fill(layer: MoELayer, name: str) -> set[int]:
    """Fill one scale of all projections of the experts; the numbers of the experts that lacked it."""
    filled: set[int] = set()
    for kind in ("gate_proj", "up_proj", "down_proj"):
        found = {
            index: linear
            for index, mlp in enumerate(layer.mlps)
            if (linear := projections(mlp).get(kind)) is not None and getattr(linear, name, None) is not None
        }
        # read once, because each read of an offloaded parameter copies it
        scales = {index: getattr(linear, name).detach() for index, linear in found.items()}
        known = {index: float(scale.max()) for index, scale in scales.items() if _usable(scale)}
        if not known:
            continue
        largest = max(known, key=lambda index: known[index])
        for index in scales.keys() - known.keys():
            filled.add(index)
            for copied in (name, ZERO_POINT[name]):
                if getattr(found[index], copied, None) is not None:
                    update_offload_parameter(found[index], copied, getattr(found[largest], copied).detach())
    return filled


def _scales(module: Module) -> list[tuple[str, Tensor]]:
    if getattr(module, "quantization_scheme", None) is None:
        return []
    # a list, because a generator would keep the context of its caller changed
    with disable_onloading():
        return [(name, scale) for name in SCALES if isinstance(scale := getattr(module, name, None), Tensor)]


def _usable(scale: Tensor) -> bool:
    # AutoRound gives weights negative scales, too
    values = scale.detach().float().abs()
    return bool((values > 0).all() and (values <= LARGEST_SCALE).all())
