"""Checks of the model, the data and the machine before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from compressed_tensors.offload import get_execution_device
from compressed_tensors.quantization.utils import is_module_quantized
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from llmcompressor.utils.dev import get_main_device
from torch import Tensor
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.interactions import SCORED, matrix_bytes
from moe_coverage_plugin.calibration.next_token import check_predicted
from moe_coverage_plugin.checkpoint.saving import PruningRecord
from moe_coverage_plugin.manifest import CoverageError, report_layers
from moe_coverage_plugin.modeling.memory import free_memory
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_linears, projections, uniform_shape
from moe_coverage_plugin.options import AttributionOptions


def check_predicted_tokens(options: AttributionOptions, batches: Sequence[dict[str, Tensor]]) -> None:
    """Check that the batches predict tokens if the loss is needed; gradients of no loss would be zero scores.

    Raises:
        CoverageError: no token is predicted.
    """
    if options.uses_gradients:
        need = f"channel_metric={options.channel_metric!r} with expert_importance={options.expert_importance!r}"
        check_predicted(batches, "all calibration batches", need)
    if options.layer_noise is not None:
        first = batches[: options.layer_batches]
        need = f"layer_noise={options.layer_noise} with layer_batches={options.layer_batches}"
        check_predicted(first, f"the first {len(first)} calibration batches", need)


def check_memory(options: AttributionOptions, layers: Sequence[MoELayer]) -> None:
    """Check that the matrices of ``obs`` fit, because the process would be killed in the middle of the pass.

    Raises:
        CoverageError: names the GiB that are needed and free.
    """
    if options.channel_metric != "obs":
        return
    experts, channels = uniform_shape(layers)
    down = projections(layers[0].mlps[0])["down_proj"]
    # the moments of output gradients of all layers in 32 bits, and the matrices of experts that are scored together
    needed = len(layers) * 4 * down.out_features**2 + min(experts, SCORED) * matrix_bytes(channels)
    # weights can have been offloaded by the name of a device
    device = torch.device(str(get_execution_device(down)))
    if device.type == "cpu":
        # the toolkit lets weights in host memory compute there
        device = get_main_device()
    cuda, free = device.type == "cuda", free_memory(device)
    if needed > free:
        raise CoverageError(
            f"channel_metric='obs' keeps {needed / 2**30:.2g} GiB of matrices in {'GPU' if cuda else 'CPU'} memory, "
            f"of which {free / 2**30:.2g} GiB are free: choose 'fisher', or a machine with more memory"
        )


def refuse_pruned(model: PreTrainedModel, layers: Sequence[MoELayer]) -> None:
    """Stop if a layer was pruned before; equal widths do not tell that a layer is unpruned.

    Layers may be pruned in several runs, each layer once.

    Raises:
        CoverageError: names the layer.
    """
    record = getattr(model.save_pretrained, "_record", None)
    if not isinstance(record, PruningRecord):
        return
    # read from a file, which may have any content
    named = report_layers(record.report)
    # only ragged checkpoints have unpruned layers; after several runs the record names the layers of the last one
    pruned = [
        layer.name
        for layer in layers
        if record.layout != "ragged" or layer.name in named or set(layer.widths) != {record.intermediate_size}
    ]
    if pruned:
        raise CoverageError(
            f"{pruned[0]} was pruned already ({len(pruned)} of {len(layers)} layers): scores of a model that was "
            "pruned before cannot be compared; prune the original model, or list these layers in ignore"
        )


def refuse_quantized(model: PreTrainedModel, layers: Sequence[MoELayer], before: Sequence[Modifier]) -> None:
    """Stop if experts are quantized, or will be before they are scored.

    Args:
        model: the model to measure.
        layers: the layers to observe.
        before: modifiers before AttributionModifier in the recipe.

    Raises:
        CoverageError: names the quantizer or the layer.
    """
    if quantizers := [type(other).__name__ for other in before if isinstance(other, QuantizationMixin)]:
        raise CoverageError(
            f"{quantizers[0]} is before AttributionModifier in the recipe: prune first, then quantize what is left"
        )
    loaded: Any = model
    if getattr(loaded, "is_loaded_in_4bit", False) or getattr(loaded, "is_loaded_in_8bit", False):
        quantized = f"{type(model).__name__} (by bitsandbytes)"
    else:
        quantized = next(
            (layer.name for layer in layers if any(map(is_module_quantized, expert_linears(layer)))), None
        )
    if quantized is not None:
        raise CoverageError(f"{quantized} is quantized already: prune the 16-bit model, then quantize what is left")
