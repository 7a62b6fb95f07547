"""Checks of the quantizers that follow a pruning in the recipe, before anything is calibrated."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils import match_named_modules
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from loguru import logger
from torch.nn import Linear, Module
from transformers import PreTrainedModel

from moe_coverage_plugin.checkpoint.scheme_checks import check_fused
from moe_coverage_plugin.expert_scheme import SERVED, check_activations, expert_scheme
from moe_coverage_plugin.manifest import CoverageError, Layout
from moe_coverage_plugin.modeling.moe_layers import (
    MoELayer,
    expert_linears,
    find_moe_layers,
    linears_that_must_stay,
)


def check_quantizers(
    model: PreTrainedModel,
    pruned: Sequence[MoELayer],
    modifiers: Sequence[Modifier],
    block_size: int,
    layout: Layout,
) -> None:
    """Stop if the result of a quantizer could not be served.

    Args:
        model: the model to prune; layers that stay unpruned are checked too.
        pruned: the layers whose widths will change.
        modifiers: the modifiers after the pruning; those that do not quantize are skipped.
        block_size: channels that every width will be a multiple of.
        layout: ``padded`` and ``uniform`` experts run in the engine's own kernels, so any scheme may follow.

    Raises:
        CoverageError: a router or the gate of shared experts is quantized; the experts of a layer are not all
            quantized by one scheme, or are targets of no quantizer; layers that engines fuse would differ; activations
            of ragged experts are quantized; or groups of weights do not fit the widths, or another layer.
    """
    layers = find_moe_layers(model)
    forbidden = linears_that_must_stay(layers)
    quantizers = [modifier for modifier in modifiers if isinstance(modifier, QuantizationMixin)]
    for modifier in quantizers:
        name = type(modifier).__name__
        scheme_of = _schemes(model, modifier)
        if touched := next((forbidden[module] for module in scheme_of if module in forbidden), None):
            pattern = f"re:.*{touched.rpartition('.')[2]}$"
            raise CoverageError(
                f'{name} would quantize {touched}, which decides routing: add "{pattern}" to its ignore'
            )
        for layer in layers:
            _check_one_scheme(name, layer, scheme_of)
        if layout == "ragged":
            _check_served(name, layers, scheme_of)
        for layer in pruned:
            _check_block_size(name, layer, scheme_of, block_size)
        _check_groups(name, model, scheme_of, pruned)
    # a quantizer of the key-value cache alone has no groups
    _check_targets(model, [each for each in quantizers if _groups(each)], layers)
    names = " and ".join(type(each).__name__ for each in quantizers)
    # later quantizers do not change the scheme of a module
    combined = {module: scheme for each in reversed(quantizers) for module, scheme in _schemes(model, each).items()}
    check_fused(model, combined.get, f"{names} would leave")


def _check_targets(
    model: PreTrainedModel, quantizers: Sequence[QuantizationMixin], layers: Sequence[MoELayer]
) -> None:
    """Stop if experts would stay in 16 bits although neither targets nor ignore name them."""
    named: set[Module] = set()
    for modifier in quantizers:
        targets = [target for scheme in _groups(modifier) for target in scheme.targets]
        named |= {module for _, module in match_named_modules(model, [*targets, *modifier.ignore])}
    for layer in layers if quantizers else ():
        linears = expert_linears(layer)
        if named.isdisjoint(linears):
            raise CoverageError(
                f"{' and '.join(type(each).__name__ for each in quantizers)} would leave all {len(linears)} expert "
                f"projections of {layer.name} in 16 bits, because no target matches them: add Linear to the targets, "
                f'or "re:.*{layer.name.rpartition(".")[2]}.*" to ignore if that is wanted'
            )


def _groups(modifier: QuantizationMixin) -> list[QuantizationScheme]:
    schemes = modifier.resolve_quantization_config().config_groups.values()
    return [scheme for scheme in schemes if isinstance(scheme, QuantizationScheme)]


def _schemes(model: PreTrainedModel, modifier: QuantizationMixin) -> dict[Module, QuantizationScheme]:
    schemes: dict[Module, QuantizationScheme] = {}
    for scheme in _groups(modifier):
        for _, module in match_named_modules(model, scheme.targets, modifier.ignore):
            schemes.setdefault(module, scheme)
    return schemes


def _check_one_scheme(name: str, layer: MoELayer, scheme_of: dict[Module, QuantizationScheme]) -> None:
    linears = expert_linears(layer)
    found = {id(scheme_of.get(linear)): scheme_of.get(linear) for linear in linears}
    if len(found) > 1:
        quantized = sum(linear in scheme_of for linear in linears)
        raise CoverageError(
            f"{name} quantizes {quantized} of {len(linears)} expert projections of {layer.name}, or by several "
            "schemes: engines need one scheme for all experts of a layer, so let targets and ignore match all of them "
            "or none"
        )


def _check_served(name: str, layers: Sequence[MoELayer], scheme_of: dict[Module, QuantizationScheme]) -> None:
    """Stop if nothing would compute experts as they were calibrated; warn of those that only ``load`` opens."""
    schemes = {id(scheme): scheme for layer in layers if (scheme := scheme_of.get(expert_linears(layer)[0]))}
    for scheme in schemes.values():
        check_activations(dict(scheme), f"{name} would give experts")
        if isinstance(reason := expert_scheme(dict(scheme)), str):
            logger.warning(f"{name} gives experts {reason}, which load() opens but no engine serves: {SERVED}")


def _check_block_size(
    name: str, layer: MoELayer, scheme_of: dict[Module, QuantizationScheme], block_size: int
) -> None:
    linear = expert_linears(layer)[0]
    group_size = _group_size(scheme_of.get(linear))
    if group_size is None:
        return
    hidden_size = linear.in_features
    if hidden_size % group_size:
        raise CoverageError(
            f"{name} has group_size {group_size}, which does not divide the hidden size {hidden_size}: choose one "
            f"that does, for instance {math.gcd(group_size, hidden_size)}"
        )
    if block_size % group_size:
        raise CoverageError(
            f"{name} has group_size {group_size} but widths will be multiples of {block_size}: give an "
            f"AlignmentModifier before ChannelPruningModifier a block_size that is a multiple of {group_size}, or "
            f"choose a group_size that divides {block_size}"
        )


def _check_groups(
    name: str, model: PreTrainedModel, scheme_of: dict[Module, QuantizationScheme], pruned: Sequence[MoELayer]
) -> None:
    """Stop if groups do not divide a layer that keeps its width, where the quantizer would stop when it runs."""
    experts = {linear for layer in pruned for linear in expert_linears(layer)}
    for path, module in model.named_modules():
        group_size = _group_size(scheme_of.get(module))
        if group_size is None or module in experts or not isinstance(module, Linear):
            continue
        if module.in_features % group_size:
            raise CoverageError(
                f"{name} has group_size {group_size}, which does not divide the {module.in_features} input channels "
                f"of {path}: choose a group size that does, for instance {math.gcd(group_size, module.in_features)}, "
                f'or add "{path}" to its ignore'
            )


def _group_size(scheme: QuantizationScheme | None) -> int | None:
    """Return the number of input channels that share a scale, ``None`` if a whole row does."""
    group_size = scheme.weights.group_size if scheme is not None and scheme.weights is not None else None
    return group_size if group_size is not None and group_size > 0 else None
