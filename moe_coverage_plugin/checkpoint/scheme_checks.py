"""Checks of a quantized model before it is saved; a quantizer can run without our modifiers, which check earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from compressed_tensors import TRANSFORM_CONFIG_NAME
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.utils import is_module_quantized
from torch.nn import Linear, Module
from transformers import PreTrainedModel

from moe_coverage_plugin.checkpoint.calibrated_scales import complete_scales
from moe_coverage_plugin.expert_scheme import FUSED, check_activations
from moe_coverage_plugin.manifest import CoverageError, Layout
from moe_coverage_plugin.modeling.moe_layers import expert_linears, find_moe_layers, linears_that_must_stay

# layers that vLLM fuses, and which so have one scheme; of experts all projections must share one
FUSED_LAYERS = (
    *FUSED,
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
# how a scale was found does not matter to engines
FOUND_BY = {"observer", "observer_kwargs"}


def check_schemes(model: PreTrainedModel, layout: Layout) -> None:
    """Check that engines can serve a quantized model; scales that experts lack are filled in.

    Raises:
        CoverageError: a router or the gate of shared experts is quantized; layers that engines fuse, or the experts
            of a layer, have different schemes; activations of experts of unequal width are quantized by a scheme other
            than ``FP8_DYNAMIC``; or a scale has no value.
    """
    check_fused(model, lambda module: getattr(module, "quantization_scheme", None), "the model has")
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
    complete_scales(model)


def check_fused(model: Module, scheme_of: Callable[[Module], QuantizationScheme | None], owner: str) -> None:
    """Check that layers that engines fuse have one scheme, or none.

    Args:
        model: of which all layers are checked.
        scheme_of: the scheme of a module; ``None``: it is not quantized.
        owner: who gives the schemes, with its verb, for the message.

    Raises:
        CoverageError: names two layers that differ.
    """
    for path, siblings in _fused_layers(model):
        first, *others = ((name, _format(scheme_of(module))) for name, module in siblings.items())
        for name, found in others:
            if found != first[1]:
                raise CoverageError(
                    f"{owner} {path}.{first[0]} {_described(first[1])} and {path}.{name} {_described(found)}, but "
                    f"engines fuse {', '.join(siblings)} into one layer: let targets and ignore match all of them, "
                    "with one scheme, or none"
                )


def _fused_layers(model: Module) -> Iterator[tuple[str, dict[str, Module]]]:
    for path, module in model.named_modules():
        for names in FUSED_LAYERS:
            siblings = {name: getattr(module, name, None) for name in names}
            found = {name: sibling for name, sibling in siblings.items() if isinstance(sibling, Linear)}
            if len(found) > 1:
                yield path, dict(found)


def _format(scheme: QuantizationScheme | None) -> dict[str, Any]:
    """What a scheme makes of weights and activations; empty: it is not quantized."""
    parts = {} if scheme is None else {"weights": scheme.weights, "input_activations": scheme.input_activations}
    return {part: args.model_dump(exclude=FOUND_BY) for part, args in parts.items() if args is not None}


def _described(found: dict[str, Any]) -> str:
    if not found:
        return "in 16 bits"
    return "with " + " and ".join(
        f"{part.replace('_', ' ')} in {args['num_bits']} bits"
        + (f" and groups of {args['group_size']}" if (args["group_size"] or 0) > 0 else "")
        for part, args in found.items()
    )


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
