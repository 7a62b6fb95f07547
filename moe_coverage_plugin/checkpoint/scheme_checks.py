"""Checks of a quantized model before it is saved; a quantizer can run without our modifiers, which check earlier."""

from __future__ import annotations

from compressed_tensors import TRANSFORM_CONFIG_NAME
from compressed_tensors.quantization.utils import is_module_quantized
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.expert_scheme import check_activations
from moe_coverage_plugin.manifest import CoverageError, Layout
from moe_coverage_plugin.modeling.moe_layers import expert_linears, find_moe_layers, linears_that_must_stay


def check_schemes(model: PreTrainedModel, layout: Layout) -> None:
    """Check that engines can serve a quantized model.

    Raises:
        CoverageError: a router or the gate of shared experts is quantized; the experts of a layer have different
            schemes; or activations of experts of unequal width are quantized by a scheme other than ``FP8_DYNAMIC``.
    """
    for layer in find_moe_layers(model):
        for module, name in linears_that_must_stay([layer]).items():
            if is_module_quantized(module):
                pattern = f"re:.*{name.rpartition('.')[2]}$"
                raise CoverageError(
                    f'{name} is quantized, which decides routing: quantize again with "{pattern}" in ignore'
                )
        first, *others = [getattr(linear, "quantization_scheme", None) for linear in expert_linears(layer)]
        if any(scheme != first for scheme in others):
            raise CoverageError(
                f"the experts of {layer.name} are quantized in several ways, or only some are quantized: engines need "
                "one scheme for all experts of a layer, quantize again with targets and ignore that match all or none"
            )
        if layout == "ragged" and first is not None:
            check_activations(dict(first), f"the experts of {layer.name} have")


def check_rotations(model: Module) -> None:
    """Check that the toolkit did not rotate the model by SpinQuant or QuIP.

    Raises:
        CoverageError: the model is rotated.
    """
    if getattr(model, TRANSFORM_CONFIG_NAME, None) is not None:
        raise CoverageError(
            "the model carries rotations (SpinQuant, QuIP), which leave routers out and which engines do not compute "
            "for experts of unequal width: quantize the pruned checkpoint again without them"
        )
