"""Removes the channels that a plan does not keep, and lets the model be saved as a pruned checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from llmcompressor.transformers.compression.compressed_tensors_utils import modify_save_pretrained
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger
from pydantic import PrivateAttr
from torch import Tensor
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.calibration_set import check_batches
from moe_coverage_plugin.checkpoint.calibrated_scales import mark_scales
from moe_coverage_plugin.checkpoint.saving import save_with_manifest
from moe_coverage_plugin.core.alignment import align
from moe_coverage_plugin.core.layouts import stored_widths
from moe_coverage_plugin.core.ragged import kept_channels
from moe_coverage_plugin.expert_scheme import PROJECTIONS
from moe_coverage_plugin.modeling.memory import return_freed_tensors
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import prune_layer
from moe_coverage_plugin.modifiers.alignment import AlignmentModifier
from moe_coverage_plugin.modifiers.coverage import CoverageModifier
from moe_coverage_plugin.modifiers.layerwise_gptq import LayerwiseGPTQModifier
from moe_coverage_plugin.modifiers.layouts import check_layout, padded_width
from moe_coverage_plugin.modifiers.oneshot_run import is_ours, predecessor, prepare, recipe_around
from moe_coverage_plugin.modifiers.output_checks import check_run_output, model_bytes
from moe_coverage_plugin.modifiers.plan import PlanModifier, WidthPlan, routing_notes
from moe_coverage_plugin.modifiers.pruning_checks import check_routers, refuse_neighbours
from moe_coverage_plugin.modifiers.pruning_record import pruning_record
from moe_coverage_plugin.modifiers.quantizers import check_quantizers
from moe_coverage_plugin.modifiers.reconstruction_pass import COST, COST_WITH_QUANTIZER, TITLE, reconstruct_layers
from moe_coverage_plugin.modifiers.resumption import run_progress
from moe_coverage_plugin.modifiers.run_bar import run_bar
from moe_coverage_plugin.options import ChannelPruningOptions


class ChannelPruningModifier(ChannelPruningOptions, Modifier):
    """Removes the channels that the plan before it does not keep, and masks removed experts in the routers.

    ``model.save_pretrained`` and ``oneshot(output_dir=...)`` then write a checkpoint with the widths in its config.
    Fields and their defaults: :class:`~moe_coverage_plugin.options.ChannelPruningOptions`.

    Lifecycle:

    - on_initialize
        - find the plan's modifier, and check the order of the recipe, the layout, the quantizers that follow, and the
          output directory
    - on_calibration_end
        - if ``reconstruct``: remove experts and mask routers, then take the calibration data through the model and
          fit and prune layer by layer
        - otherwise: prune all layers and mask routers
        - replace ``model.save_pretrained``

    Example recipe::

        ChannelPruningModifier:
          layout: ragged
    """

    # it makes its own pass over the data, so the toolkit need not
    requires_calibration_data: bool = False

    _coverage: CoverageModifier = PrivateAttr()
    _planner: PlanModifier = PrivateAttr()
    _plan: WidthPlan = PrivateAttr()
    _recipe: list[dict[str, Any]] = PrivateAttr(default_factory=list)
    _kept: dict[str, list[Tensor]] = PrivateAttr(default_factory=dict)
    _widths_LE: Tensor = PrivateAttr()
    _padded_width: int | None = PrivateAttr(default=None)
    _bytes_before: int = PrivateAttr(default=0)
    # quantizes each layer of the reconstruction once it is pruned
    _quantizer: LayerwiseGPTQModifier | None = PrivateAttr(default=None)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the plan's modifier and check everything that could stop the run later."""
        prepare(self)
        return_freed_tensors()
        # now, because quantizers that follow add parameters when they initialize
        self._bytes_before = model_bytes(state.model)
        self._coverage = predecessor(self, CoverageModifier)
        self._planner = predecessor(self, AlignmentModifier, CoverageModifier)
        layers, block_size = self._coverage.attribution.layers, self._planner.width_multiple
        before, after = recipe_around(self)
        refuse_neighbours(before, after, ChannelPruningModifier, [self._coverage, self._planner])
        check_layout(self.layout, self._coverage, state.model)
        alignment = self._planner if isinstance(self._planner, AlignmentModifier) else None
        self._coverage.check_budget(alignment, self.layout)
        if self.layout == "ragged" and self._coverage.sparsity > 0:
            check_routers(layers)
        check_quantizers(state.model, layers, after, block_size, self.layout)
        quantized = any(isinstance(other, QuantizationMixin) for other in after)
        check_run_output(state.model, layers, self._coverage.sparsity, quantized, before, self._kept_share(after))
        if self.reconstruct:
            check_batches(state.data.calib)
            if after and isinstance(after[0], LayerwiseGPTQModifier):
                self._quantizer = after[0]
                self._quantizer.join_reconstruction()
        ours = [other for other in (*before, self) if is_ours(other)]
        self._recipe = [{type(other).__name__: other.model_dump(exclude=set(Modifier.model_fields))} for other in ours]
        return True

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Fit and prune the experts, and let the model be saved."""
        self._choose_channels(state.model)
        layers = self._coverage.attribution.layers
        if self.reconstruct:
            assert state.data.calib is not None
            # the toolkit draws the samples again for the passes of other modifiers, which must see them in this order
            with torch.random.fork_rng(devices=[]):
                batches = list(state.data.calib)
            # quantizers that follow are not calibrated yet
            with DisableQuantization(state.model), run_bar(len(batches)):
                reconstruct_layers(
                    state.model,
                    layers,
                    self._kept,
                    self._padded_width,
                    batches,
                    full=self.refit == "all",
                    quantizer=self._quantizer,
                    progress=run_progress(state.model, batches),
                )
        else:
            for layer in layers:
                prune_layer(layer, self._kept.pop(layer.name), self._padded_width)
                mask_router(layer)
        # the quantizers that follow have not run yet
        mark_scales(state.model)
        self._prepare_saving(state.model)
        total, kept = self._plan.scores.channels_LEI.numel(), int(self._widths_LE.sum())
        logger.info(
            f"Removed {total - kept} of {total} expert channels and {int((self._widths_LE == 0).sum())} experts: "
            f"{self._bytes_before / 2**20:.1f} MiB of weights became {model_bytes(state.model) / 2**20:.1f}"
        )

    def passes(self, batches: int) -> dict[str, float]:
        """Return the costs of the pass (see :func:`~moe_coverage_plugin.modifiers.run_bar.run_bar`)."""
        if not self.reconstruct:
            return {}
        return {TITLE: COST if self._quantizer is None else COST_WITH_QUANTIZER}

    def _kept_share(self, after: Sequence[Modifier]) -> float:
        """Return the share of the experts' weights that passes layer by layer keep as the progress of the run."""
        if any(isinstance(other, LayerwiseGPTQModifier) for other in after):
            return 1.0
        if not self.reconstruct or self._coverage.sparsity == 0:
            return 0.0
        return 1.0 if self.refit == "all" else 1 / len(PROJECTIONS)

    def _choose_channels(self, model: PreTrainedModel) -> None:
        """Choose the channels to keep, as the layout can store them."""
        plan, layers = self._final_plan(), self._coverage.attribution.layers
        widths_LE = stored_widths(self.layout, plan.widths_LE, self._coverage.budget, plan.block_size)
        if kept_for_layout := int(((plan.widths_LE == 0) & (widths_LE > 0)).sum()):
            logger.warning(
                f"layout={self.layout!r} cannot remove experts: {kept_for_layout} keep {int(widths_LE.min())} "
                "channels instead of none"
            )
        self._plan = plan
        kept_LE = kept_channels(plan.scores.channels_LEI, widths_LE)
        self._kept = {layer.name: kept_E for layer, kept_E in zip(layers, kept_LE, strict=True)}
        self._widths_LE = widths_LE
        self._padded_width = padded_width(self.layout, widths_LE, self._coverage, model)

    def _final_plan(self) -> WidthPlan:
        """Return the plan, with the experts that routers need if no alignment has seen to that."""
        plan = self._planner.plan
        if isinstance(self._planner, AlignmentModifier):
            return plan
        aligned = align(plan.widths_LE, plan.scores, None, self._coverage.scope)
        return WidthPlan(plan.scores, aligned.widths_LE, plan.block_size, plan.notes | routing_notes(aligned))

    def _prepare_saving(self, model: PreTrainedModel) -> None:
        # oneshot has done this, but a session that is driven by hand has not
        modify_save_pretrained(model)
        record = pruning_record(
            self._coverage.attribution,
            self._plan,
            self._widths_LE,
            recipe=self._recipe,
            layout=self.layout,
            block_size=_common_divisor(model, self._plan.block_size),
            pictures=self.pictures,
            source=model.name_or_path or "",
            bytes_before=self._bytes_before,
        )
        save_with_manifest(model, record)


def _common_divisor(model: PreTrainedModel, block_size: int) -> int:
    """Return the largest divisor of the block size and of all widths, those of unpruned layers included."""
    return math.gcd(block_size, *(width for layer in find_moe_layers(model) for width in layer.widths))
