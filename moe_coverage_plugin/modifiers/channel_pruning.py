"""Cuts the planned channels out of the model and sees to it that it is saved as a pruned checkpoint."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from llmcompressor.core import Event, State, active_session
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from llmcompressor.transformers.compression.compressed_tensors_utils import modify_save_pretrained
from loguru import logger
from pydantic import PrivateAttr
from torch import Tensor
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.gram import GramObserver
from moe_coverage_plugin.calibration.token_mask import TokenMask, check_batches
from moe_coverage_plugin.checkpoint.saving import check_output, save_with_manifest
from moe_coverage_plugin.core.ragged import kept_channels
from moe_coverage_plugin.core.reconstruction import reconstruct_down
from moe_coverage_plugin.manifest import CoverageError, Layout
from moe_coverage_plugin.modeling.grouped_experts import grouped_experts
from moe_coverage_plugin.modeling.memory import return_freed_tensors
from moe_coverage_plugin.modeling.moe_layers import (
    expert_linears,
    find_moe_layers,
    projections,
    shared_experts_follow,
)
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import prune_layer, remove_expert
from moe_coverage_plugin.modifiers.alignment import AlignmentModifier
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.coverage import CoverageModifier
from moe_coverage_plugin.modifiers.oneshot_run import is_ours, predecessor, prepare, recipe_around, running_oneshot
from moe_coverage_plugin.modifiers.plan import PlanModifier, WidthPlan
from moe_coverage_plugin.modifiers.pruning_checks import check_routable, refuse_neighbours
from moe_coverage_plugin.modifiers.pruning_record import pruning_record
from moe_coverage_plugin.modifiers.quantizers import check_quantizers


class ChannelPruningModifier(Modifier):
    """Removes the channels that the plan before it does not keep, and masks removed experts in the routers.

    ``model.save_pretrained`` and ``oneshot(output_dir=...)`` then write a checkpoint with the widths in its config.

    Args:
        layout: ``ragged`` stores every expert at its own width. ``padded`` appends zero channels up to the widest
            expert, so that stock engines load it, at no saving. ``uniform`` gives all experts the average width of the
            budget and their best channels: stock engines load it and save memory. A stock router cannot be masked, so
            the latter two remove no expert whole, and one width must do for all, so they leave no layer out.
        reconstruct: fit the kept columns ``W'`` of every ``down_proj`` to what the whole expert answered on the
            calibration set, ``min sum_t g^2 ||W A_t - W' A_tk||^2 + lambda ||W' - W_k||^2``, layer by layer, so that
            later layers are fitted to what earlier ones now answer. Costs one forward pass.
        pictures: draw the plan into a folder beside the checkpoint's weights.

    Example recipe::

        ChannelPruningModifier:
          layout: ragged
    """

    layout: Layout = "ragged"
    reconstruct: bool = False
    pictures: bool = True

    _coverage: CoverageModifier = PrivateAttr()
    _planner: PlanModifier = PrivateAttr()
    _recipe: list[dict[str, Any]] = PrivateAttr(default_factory=list)
    _kept: dict[str, list[Tensor]] = PrivateAttr(default_factory=dict)
    _widths_LE: Tensor = PrivateAttr()
    _padded_width: int | None = PrivateAttr(default=None)
    _observed: list[tuple[GramObserver, ExitStack]] = PrivateAttr(default_factory=list)
    _bytes_before: int = PrivateAttr(default=0)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        prepare(self)
        return_freed_tensors()
        # quantizers that follow add parameters when they initialize
        self._bytes_before = model_bytes(state.model)
        self._coverage = predecessor(self, CoverageModifier)
        self._planner = predecessor(self, AlignmentModifier, CoverageModifier)
        before, after = recipe_around(self)
        refuse_neighbours(before, after, ChannelPruningModifier, [self._coverage, self._planner])
        self._coverage.require_channels(self._planner.narrowest)
        self._check_layout(state.model)
        check_quantizers(
            state.model, self._coverage.attribution.layers, after, self._planner.width_multiple, self.layout
        )
        quantized = any(isinstance(other, QuantizationMixin) for other in after)
        self._check_output(state.model, quantized, before)
        self.requires_calibration_data = self.reconstruct
        if self._coverage.attribution.channel_metric == "obs" and not self.reconstruct:
            logger.warning(
                "channel_metric='obs' counts on the fit of reconstruct=True: without it, 'fisher' loses less"
            )
        if self.reconstruct:
            check_batches(state.data.calib)
        ours = [other for other in (*before, self) if is_ours(other)]
        self._recipe = [{type(other).__name__: other.model_dump(exclude=set(Modifier.model_fields))} for other in ours]
        return True

    @property
    def _uniform_width(self) -> int:
        """Channels that the budget leaves every expert, in whole blocks."""
        experts = self._coverage.total_channels // self._coverage.attribution.intermediate_size
        average = self._coverage.budget // experts
        return average - average % self._planner.width_multiple

    def _check_layout(self, model: PreTrainedModel) -> None:
        if self.layout != "ragged" and (ignore := self._coverage.attribution.ignore):
            raise CoverageError(
                f"layout={self.layout!r} stores one width for the whole model, but ignore={ignore} leaves layers at "
                "theirs: empty ignore, or use layout='ragged'"
            )
        if self.layout == "uniform" and shared_experts_follow(model):
            raise CoverageError(
                f"layout='uniform' changes the width that {type(model).__name__} also sizes its shared experts by, so "
                "no stock engine could load it: use layout='ragged' or 'padded'"
            )
        if self.layout == "uniform" and self._uniform_width == 0:
            raise CoverageError(
                f"layout='uniform' with sparsity={self._coverage.sparsity} would give every expert less than one "
                f"block of {self._planner.width_multiple} channels: lower sparsity or block_size"
            )

    def _check_output(self, model: PreTrainedModel, quantized: bool, before: list[Modifier]) -> None:
        run = running_oneshot()
        if run is None or run.output_dir is None:
            return
        kept = [other.save_scores for other in before if isinstance(other, AttributionModifier)]
        for path in filter(None, kept):
            # the checkpoint is written last, into a directory that must be empty
            if Path(path).resolve().is_relative_to(Path(run.output_dir).resolve()):
                raise CoverageError(
                    f"save_scores={path} lies in the output {run.output_dir}, which must stay empty until the "
                    "checkpoint is written with a copy of the scores: name a file beside it, or leave save_scores out"
                )
        linears = [linear for layer in self._coverage.attribution.layers for linear in expert_linears(layer)]
        with disable_onloading():
            pruned_bytes = sum(linear.weight.nbytes for linear in linears) * self._coverage.sparsity
        # an estimate from below, so that nothing that would fit is refused: four bits and scales take over a quarter
        kept_bytes = int(model_bytes(model) - pruned_bytes)
        check_output(Path(run.output_dir), needed_bytes=kept_bytes // 4 if quantized else kept_bytes)

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        if not self.reconstruct:
            return
        if not self._planner.planned:
            raise CoverageError(
                "reconstruct=True fits what the plan keeps, which one pass shared with the modifiers before it cannot "
                'know yet: give every modifier its own with pipeline="independent", the default of oneshot'
            )
        self._prepare(state.model)
        assert state.data.calib is not None
        with torch.random.fork_rng(devices=[]):
            token_mask = TokenMask(state.data.calib)
        session_state = active_session().state

        def on_embedding(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            token_mask.on_embedding(session_state.current_batch_idx, module, args)

        def real_tokens(tokens: int) -> Tensor | None:
            return token_mask.of(session_state.current_batch_idx, tokens)

        embeddings: Any = state.model.get_input_embeddings()
        self.register_hook(embeddings, on_embedding, "forward_pre")  # type: ignore[arg-type] - see below
        for layer in self._coverage.attribution.layers:
            # gone before the pass, so that their tokens already reach the experts that will answer them
            for index, kept_N in enumerate(self._kept[layer.name]):
                if kept_N.numel() == 0 and self._padded_width is None:
                    remove_expert(layer, index)
            mask_router(layer)
            observer, tracing = GramObserver(layer), ExitStack()
            tracing.enter_context(grouped_experts(layer, observer.observe, real_tokens))
            self._observed.append((observer, tracing))

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: list[torch.nn.Module], **kwargs: Any
    ) -> None:
        # a layer has seen either none or all of the batches; its matrices are too large to keep for all layers
        for observed in [observed for observed in self._observed if observed[0].began]:
            self._observed.remove(observed)
            observer, tracing = observed
            tracing.close()
            kept_E = self._kept.pop(observer.layer.name)
            prune_layer(observer.layer, kept_E, self._padded_width, _fitted_columns(observer, kept_E))

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        self.remove_hooks()
        assert not self._observed, f"{len(self._observed)} layers saw no batch"
        if not self.reconstruct:
            self._prepare(state.model)
            for layer in self._coverage.attribution.layers:
                prune_layer(layer, self._kept.pop(layer.name), self._padded_width)
                mask_router(layer)
        # oneshot has done so; where a session is driven by hand nobody has
        modify_save_pretrained(state.model)
        divisor = _common_divisor(state.model, self._planner.plan.block_size)
        record = pruning_record(
            self._coverage.attribution,
            self._planner.plan,
            self._widths_LE,
            recipe=self._recipe,
            layout=self.layout,
            block_size=divisor,
            pictures=self.pictures,
            source=state.model.name_or_path,
            bytes_before=self._bytes_before,
        )
        save_with_manifest(state.model, record)
        total, kept = self._planner.plan.scores.channels_LEI.numel(), int(self._widths_LE.sum())
        logger.info(
            f"Pruned {total - kept} of {total} expert channels and {int((self._widths_LE == 0).sum())} whole experts: "
            f"{self._bytes_before / 2**20:.1f} MiB of weights became {model_bytes(state.model) / 2**20:.1f}"
        )

    def _prepare(self, model: PreTrainedModel) -> None:
        """Decide which channels stay, or refuse."""
        plan, layers = self._planner.plan, self._coverage.attribution.layers
        self._widths_LE = widths_LE = self._stored_widths(plan)
        for layer, widths_E in zip(layers, widths_LE, strict=True):
            check_routable(layer, widths_E)
        kept_LE = kept_channels(plan.scores.channels_LEI, widths_LE)
        self._kept = {layer.name: kept_E for layer, kept_E in zip(layers, kept_LE, strict=True)}
        if self.layout == "padded":
            whole = shared_experts_follow(model)
            self._padded_width = self._coverage.attribution.intermediate_size if whole else int(widths_LE.max())

    def _stored_widths(self, plan: WidthPlan) -> Tensor:
        """The planned widths as far as the layout can say them."""
        if self.layout == "ragged":
            return plan.widths_LE
        if self.layout == "padded":
            widths_LE = plan.widths_LE.clamp(min=plan.block_size)
        else:
            widths_LE = torch.full_like(plan.widths_LE, self._uniform_width)
        if revived := int((plan.widths_LE == 0).sum()):
            logger.warning(
                f"layout={self.layout!r} cannot remove experts: {revived} keep {int(widths_LE.min())} channels "
                "instead of none"
            )
        return widths_LE


@torch.no_grad()
def _fitted_columns(observer: GramObserver, kept_E: list[Tensor]) -> dict[int, Tensor]:
    """The columns that stay of every ``down_proj``, fitted; by expert, without those that no token reached."""
    return {
        index: reconstruct_down(projections(observer.layer.mlps[index])["down_proj"].weight, gram_II, kept_E[index])
        for index, gram_II in observer.grams().items()
    }


def _common_divisor(model: PreTrainedModel, block_size: int) -> int:
    """What all widths are multiples of, those of layers left as they were included."""
    return math.gcd(block_size, *(width for layer in find_moe_layers(model) for width in layer.widths))


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, wherever they lie."""
    # offloaded ones would all be copied to where they compute
    with disable_onloading():
        return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
