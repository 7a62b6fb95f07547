"""GPTQ of all experts of a layer together, in the pass of the reconstruction before it if there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from compressed_tensors.distributed import greedy_bin_packing, is_distributed
from compressed_tensors.offload import get_execution_device, update_offload_parameter
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy
from llmcompressor.core import Event, State
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.gptq.helpers import assign_batches
from llmcompressor.modifiers.quantization import QuantizationMixin
from llmcompressor.modifiers.quantization.calibration import (
    apply_calibration_status,
    freeze_module_quantization,
    observe,
)
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger
from pydantic import PrivateAttr, model_validator
from torch import Tensor
from torch import distributed as dist
from torch.nn import Linear, Module
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.calibration_set import check_batches
from moe_coverage_plugin.calibration.distributed import gather_over_ranks
from moe_coverage_plugin.calibration.layer_inputs import LayerInputs
from moe_coverage_plugin.calibration.layerwise import DecoderStep, visit_layers
from moe_coverage_plugin.calibration.observation import decoder_layers
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.grouped_experts import ExpertFunction
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_linears, find_moe_layers
from moe_coverage_plugin.modifiers.gptq_batches import quantize_modules
from moe_coverage_plugin.modifiers.kept_layers import KeptLayers, restore
from moe_coverage_plugin.modifiers.oneshot_run import prepare
from moe_coverage_plugin.modifiers.resumption import run_progress
from moe_coverage_plugin.modifiers.run_bar import run_bar
from moe_coverage_plugin.modifiers.shared_inputs import QUANTIZED, InputSums, hessian, stacked
from moe_coverage_plugin.modifiers.weight_ranges import observe_weighted, weighs_inputs

# of the mean of the diagonal: keeps weights of channels that no token activates, which the toolkit would set to zero
FLOOR = 1e-9
# of the pass, and its cost in forward passes over the calibration set
TITLE, COST = "Quantization", 3.0


class LayerwiseGPTQModifier(GPTQModifier):
    """GPTQ in a pass of its own, layer by layer, that computes the experts of a layer together.

    Weights are quantized by the toolkit's arithmetic
    (:mod:`~moe_coverage_plugin.modifiers.gptq_batches`). What differs is where its Hessian matrices are from: those of
    an expert count the tokens that the router sent to it, without padding, and exist for a few experts at a time.

    Directly behind ``ChannelPruningModifier(reconstruct=True)`` there is no pass: each layer is quantized right after
    it is pruned, and later layers are fitted to what it computes then. Fields: those of ``GPTQModifier``. With
    ``weight_observer="imatrix_mse"``, the ranges of weights are those with the least error at the same inputs
    (:mod:`~moe_coverage_plugin.modifiers.weight_ranges`).

    Lifecycle:

    - on_initialize
        - attach the scheme to the modules, and check that this pass reaches all of them
    - on_calibration_end
        - take the calibration data through the model and quantize layer by layer, unless a reconstruction has done so
        - freeze scales and zero points

    Example recipe::

        LayerwiseGPTQModifier:
          targets: [Linear]
          scheme: W4A16
          weight_observer: imatrix_mse
          ignore: [lm_head]
    """

    # it makes its own pass over the data, so the toolkit need not
    requires_calibration_data: bool = False

    # whether the reconstruction before it quantizes each layer
    _joined: bool = PrivateAttr(default=False)
    # Hessian matrices of linear layers outside of experts, of the decoder layer that is observed now
    _others: InputSums = PrivateAttr(default_factory=InputSums)
    # squared differences of outputs, by linear layer, of the decoder layer that is quantized now
    _errors: dict[str, float] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _counts_inputs_itself(self) -> Self:
        """Leave the toolkit's pass out for ``imatrix_mse``, too."""
        groups = self._groups
        activations = [each for group in groups for each in (group.input_activations, group.output_activations)]
        observed = any(each is not None and each.dynamic is not True for each in activations)
        self.requires_calibration_data = observed or self.kv_cache_scheme is not None
        return self

    @property
    def _groups(self) -> list[QuantizationScheme]:
        groups = self.resolved_config.config_groups.values()
        return [group for group in groups if not isinstance(group, list)]

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Attach the scheme, and check model, data and schemes."""
        prepare(self)
        self._check_schemes()
        check_batches(state.data.calib)
        super().on_initialize(state, **kwargs)
        self._check_places(state.model)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Do nothing: in a pass that modifiers share, this is before pruning."""

    def on_sequential_epoch_end(self, state: State, event: Event, modules: list[Module], **kwargs: Any) -> None:
        """Do nothing: modules are quantized where their Hessian matrices are."""

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Quantize, unless a reconstruction has done so, and freeze scales and zero points."""
        if not self._joined:
            assert state.data.calib is not None
            with torch.random.fork_rng(devices=[]):
                batches = list(state.data.calib)
            layers = find_moe_layers(state.model)
            plan = [repr(layer.widths).encode() for layer in layers]
            kept = KeptLayers(run_progress(state.model, batches), TITLE, batches, plan)
            with DisableQuantization(state.model), run_bar(len(batches)):
                visit_layers(state.model, layers, batches, partial(self._visit, kept), TITLE)
            kept.finish()
        QuantizationMixin.end_calibration(self, state.model)

    def _visit(self, kept: KeptLayers, step: DecoderStep) -> None:
        changes_others = self.changes_others(step)
        if not step.layers and not changes_others:
            return
        if (tensors := kept.load()) is not None:
            restore(step.decoder_layer, tensors)
            self.freeze(step)
            return
        with self.watched(step) as hooked:
            inputs = step.observe(changes=True, hooked=hooked, only_experts=not changes_others)
        for layer, each in inputs:
            self.quantize_experts(layer, each)
        self.quantize_others(step)
        kept.save(step.decoder_layer, self.quantized(step), {})

    def quantized(self, step: DecoderStep) -> list[Module]:
        """Return the modules of a decoder layer that are to be quantized, experts included."""
        return [module for module in step.decoder_layer.modules() if module in self._module_names]

    def freeze(self, step: DecoderStep) -> None:
        """Mark the modules of a decoder layer as quantized, whose weights and scales were put back."""
        for module in self.quantized(step):
            freeze_module_quantization(module)

    def join_reconstruction(self) -> None:
        """Leave all layers to the pass of the reconstruction, when the recipe initializes."""
        self._joined = True

    def passes(self, batches: int) -> dict[str, float]:
        """Return the costs of the pass (see :func:`~moe_coverage_plugin.modifiers.run_bar.run_bar`)."""
        return {} if self._joined else {TITLE: COST}

    @contextmanager
    def watched(self, step: DecoderStep) -> Iterator[bool]:
        """Collect the Hessian matrices of the linear layers outside of experts while a decoder layer is observed.

        Yields:
            Whether some of these layers see what is computed from the outputs of experts.
        """

        def add(module: Module, args: tuple[Tensor, ...], _output: Any) -> None:
            self._others.add(module, args[0], step.current.real_T)

        modules = self._modules_of(step)
        depends = step.depends_on_experts(modules)
        handles = [module.register_forward_hook(add) for module in modules]
        try:
            yield depends
        finally:
            for handle in handles:
                handle.remove()
            self._others.forget_last()

    def changes_others(self, step: DecoderStep) -> bool:
        """Return whether linear layers of a decoder layer, outside of its experts, are to be quantized."""
        return bool(self._modules_of(step))

    def quantize_others(self, step: DecoderStep) -> None:
        """Quantize the linear layers outside of experts of a decoder layer that was watched."""
        # without an input, weights are rounded to nearest
        self._quantize(self._others.pop(self._modules_of(step)))
        if self._errors:
            # some names are of several modules
            names = " and ".join(self._errors).split(" and ")
            place = os.path.commonpath([name.replace(".", "/") for name in names]).replace("/", ".")
            logger.info(f"Quantized {len(names)} linear layers of {place}, error {sum(self._errors.values()):.4g}")
            self._errors = {}

    def quantize_experts(self, layer: MoELayer, inputs: LayerInputs, experts: Sequence[int] | None = None) -> None:
        """Quantize experts of a layer as they are now.

        Args:
            layer: the layer; removed experts are skipped.
            inputs: of the layer.
            experts: their indices; ``None``: all.
        """
        if not any(linear in self._module_names for linear in expert_linears(layer)):
            return
        widths = layer.widths
        kept = [index for index in (range(len(widths)) if experts is None else experts) if widths[index]]
        together = inputs.experts_together
        for first in range(0, len(kept), together):
            hessians: dict[Module, Tensor] = {}
            for index in kept[first : first + together]:
                x_MH = inputs.tokens(index).x_MH
                with ExpertFunction(layer, index) as function:
                    hessians |= dict.fromkeys(function.inputs, hessian(x_MH))
                    hessians[function.projections["down_proj"]] = hessian(function.activation(x_MH))
            self._quantize(hessians)

    def _quantize(self, hessians: Mapping[Module, Tensor]) -> None:
        """Quantize modules by the toolkit's GPTQ; collective."""
        for hessian_AA in {id(each): each for each in hessians.values()}.values():
            diagonal_A = hessian_AA.diagonal()
            diagonal_A += FLOOR * diagonal_A.mean().clamp(min=FLOOR)
        own = {m: each for m, each in hessians.items() if getattr(m, "quantization_scheme", None) is not None}
        for module in own:
            self._initialize_observers(module)
            apply_calibration_status(module)
        weighted = {module: own[module].diagonal().clone() for module in own if weighs_inputs(module)}
        if is_distributed():
            for squares_A in weighted.values():
                dist.all_reduce(squares_A)
        observe_weighted(weighted)
        observe([module for module in own if module not in weighted], base_name="weight")
        # ranks write the weights of a module one by one
        stacks = [] if is_distributed() else stacked(own)
        together = {linear for stack in stacks for linear in stack.linears}
        alone = {module: each for module, each in own.items() if module not in together}
        for module, hessian_AA in [*alone.items(), *((stack, own[stack.linears[0]]) for stack in stacks)]:
            # ranks add theirs in place, and gate_proj and up_proj share one
            self._hessians[module] = hessian_AA.clone() if is_distributed() else hessian_AA
            self._num_samples[module] = torch.ones((), device=hessian_AA.device)
        # the toolkit logs them
        names = {stack: " and ".join(self._module_names[each] for each in stack.linears) for stack in stacks}
        self._module_names |= names
        self.compress_modules()
        for stack in stacks:
            stack.write_back()
            del self._module_names[stack]
        for module in own:
            freeze_module_quantization(module)

    def compress_modules(self) -> None:
        """Quantize all modules that have a Hessian matrix, each on one rank, for all ranks; collective."""
        if not is_distributed():
            super().compress_modules()
            return
        # as the toolkit assigns them
        _, _, owners = greedy_bin_packing(
            list(self._hessians), dist.get_world_size(), item_weight_fn=lambda module: self._hessians[module].shape[0]
        )
        super().compress_modules()
        for module, owner in owners.items():
            # patch: cpu-ranks
            if get_execution_device(module) == torch.device("cpu"):
                own = {name: getattr(module, name).detach() for name in QUANTIZED if hasattr(module, name)}
                for name, value in gather_over_ranks(own)[owner].items():
                    update_offload_parameter(module, name, value)

    def compress_module_list(self, module_list: list[Module]) -> None:
        """Quantize modules that have a Hessian matrix, those of one shape together.

        Values are read from the device once for all of them, and the toolkit's log of memory for each is left out.
        """
        assert self.dampening_frac is not None
        for batch in assign_batches(module_list, self.batched_quantization, self.block_size):
            names = [self._module_names[module] for module in batch]
            errors, nearest = quantize_modules(
                batch, self._hessians, self._num_samples, self.block_size, self.dampening_frac
            )
            self._errors |= dict(zip(names, errors, strict=True))
            # the toolkit warns of them
            self._rtn_fallback_module_names += [name for name, each in zip(names, nearest, strict=True) if each]
            self._num_compressed_modules += len(batch)

    def _modules_of(self, step: DecoderStep) -> list[Linear]:
        experts = {linear for layer in step.layers for linear in expert_linears(layer)}
        return [
            module
            for module in step.decoder_layer.modules()
            if isinstance(module, Linear) and module in self._module_names and module not in experts
        ]

    def _check_schemes(self) -> None:
        """Stop at schemes that need more than the inputs of linear layers."""
        name = type(self).__name__
        weights = [group.weights for group in self._groups if group.weights is not None]
        if self.requires_calibration_data or any(
            each.strategy == QuantizationStrategy.TENSOR_GROUP for each in weights
        ):
            raise CoverageError(
                f"{name} quantizes weights only, without scales of activations or global scales: use GPTQModifier for "
                "this scheme"
            )

    def _check_places(self, model: PreTrainedModel) -> None:
        """Stop if a module to quantize is outside of the decoder layers, which this pass takes one by one."""
        layers = decoder_layers(model, find_moe_layers(model))
        inside = {module for layer in layers for module in layer.modules()}
        outside = [name for module, name in self._module_names.items() if module not in inside]
        if outside:
            raise CoverageError(
                f"LayerwiseGPTQModifier would quantize {outside[0]} ({len(outside)} such layers), which is outside of "
                f'the decoder layers: add "{outside[0]}" to its ignore, or use GPTQModifier'
            )
        others = [name for module, name in self._module_names.items() if not isinstance(module, Linear)]
        if others:
            raise CoverageError(
                f'LayerwiseGPTQModifier would quantize {others[0]}, which is not linear: add "{others[0]}" to its '
                "ignore, or use GPTQModifier"
            )
