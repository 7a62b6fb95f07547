"""Cuts the planned channels out of the model and sees to it that it is saved as a pruned checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.pruning.reap.base import REAPPruningModifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from llmcompressor.transformers.compression.compressed_tensors_utils import modify_save_pretrained
from loguru import logger
from pydantic import PrivateAttr
from torch import Tensor
from torch.nn import Linear
from tqdm import tqdm
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.expert_blocks import (
    ExpertBlock,
    find_expert_blocks,
    projections,
    shared_experts_follow,
)
from moe_coverage_plugin.core.ragged import kept_channels, prefix_scores
from moe_coverage_plugin.manifest import CoverageError, Layout
from moe_coverage_plugin.modifiers.alignment import AlignmentModifier
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.coverage import CoverageModifier
from moe_coverage_plugin.modifiers.oneshot_run import is_ours, predecessor, prepare, recipe_around, running_oneshot
from moe_coverage_plugin.modifiers.plan import PlanModifier, WidthPlan
from moe_coverage_plugin.modifiers.quantizers import check_quantizers
from moe_coverage_plugin.surgery.checkpoint import PruningRecord, check_output, save_with_manifest
from moe_coverage_plugin.surgery.expert_names import check_quantizable
from moe_coverage_plugin.surgery.experts import prune_block
from moe_coverage_plugin.surgery.router import mask_router


class ChannelPruningModifier(Modifier):
    """Removes the channels that the plan before it does not keep, and masks removed experts in the routers.

    ``model.save_pretrained`` and ``oneshot(output_dir=...)`` then write a checkpoint with the widths in its config.

    Args:
        layout: ``ragged`` stores every expert at its own width. ``padded`` appends zero channels up to the widest
            expert, so that stock engines load it, at no saving. ``uniform`` gives all experts the average width of the
            budget and their best channels: stock engines load it and save memory. A stock router cannot be masked, so
            the latter two remove no expert whole, and one width must do for all, so they leave no layer out.

    Example recipe::

        ChannelPruningModifier:
          layout: ragged
    """

    layout: Layout = "ragged"

    _coverage: CoverageModifier = PrivateAttr()
    _planner: PlanModifier = PrivateAttr()
    _recipe: list[dict[str, Any]] = PrivateAttr(default_factory=list)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        prepare(self)
        self._coverage = predecessor(self, CoverageModifier)
        self._planner = predecessor(self, AlignmentModifier, CoverageModifier)
        before, after = recipe_around(self)
        _refuse_neighbours(before, after)
        self._coverage.require_channels(self._planner.narrowest)
        self._check_layout(state.model)
        check_quantizers(state.model, self._coverage.attribution.blocks, after, self._planner.width_multiple)
        quantized = any(isinstance(other, QuantizationMixin) for other in after)
        if quantized:
            check_quantizable(state.model)
        self._check_output(state.model, quantized)
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

    def _check_output(self, model: PreTrainedModel, quantized: bool) -> None:
        run = running_oneshot()
        if run is None or run.output_dir is None:
            return
        linears = [linear for block in self._coverage.attribution.blocks for linear in block_linears(block)]
        pruned_bytes = sum(linear.weight.nbytes for linear in linears) * self._coverage.sparsity
        # an estimate from below, so that nothing that would fit is refused: four bits and scales take over a quarter
        kept_bytes = int(model_bytes(model) - pruned_bytes)
        check_output(Path(run.output_dir), needed_bytes=kept_bytes // 4 if quantized else kept_bytes)

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        plan = self._planner.plan
        blocks = self._coverage.attribution.blocks
        widths_LE = self._stored_widths(plan)
        for block, widths_E in zip(blocks, widths_LE, strict=True):
            check_routable(block, widths_E)
        kept_LE = kept_channels(plan.scores.channels_LEI, widths_LE)
        padded_width = self._padded_width(state.model, widths_LE) if self.layout == "padded" else None
        before = model_bytes(state.model)
        for block, kept_E in tqdm(list(zip(blocks, kept_LE, strict=True)), desc="Pruning channels"):
            prune_block(block, kept_E, padded_width)
            mask_router(block)
        # oneshot has done so; where a session is driven by hand nobody has
        modify_save_pretrained(state.model)
        record = PruningRecord(
            layout=self.layout,
            intermediate_size=plan.scores.channels_LEI.shape[-1],
            block_size=_common_divisor(state.model, plan.block_size),
            provenance=self._provenance(state.model),
            report=_report(plan, widths_LE),
            companions=_tokenizer_of_run(),
        )
        save_with_manifest(state.model, record)
        removed = int((widths_LE == 0).sum())
        logger.info(
            f"Pruned {plan.scores.channels_LEI.numel() - int(widths_LE.sum())} of {plan.scores.channels_LEI.numel()} "
            f"expert channels and {removed} whole experts: {before / 2**20:.1f} MiB of weights became "
            f"{model_bytes(state.model) / 2**20:.1f}"
        )

    def _padded_width(self, model: PreTrainedModel, widths_LE: Tensor) -> int:
        return self._coverage.attribution.intermediate_size if shared_experts_follow(model) else int(widths_LE.max())

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

    def _provenance(self, model: PreTrainedModel) -> dict[str, Any]:
        packages = ("moe-coverage-plugin", "llmcompressor", "compressed-tensors", "transformers", "torch")
        return {
            "model": model.config._name_or_path,
            "recipe": self._recipe,
            **self._coverage.attribution.calibration,
            "torch_seed": torch.initial_seed(),
            "versions": {package: version(package) for package in packages},
        }


def _refuse_neighbours(before: Sequence[Modifier], after: Sequence[Modifier]) -> None:
    if quantizer := next((type(other).__name__ for other in before if isinstance(other, QuantizationMixin)), None):
        raise CoverageError(
            f"{quantizer} stands before ChannelPruningModifier: prune first, then quantize what is left"
        )
    if any(isinstance(other, ChannelPruningModifier) for other in before):
        raise CoverageError(
            "the recipe has two ChannelPruningModifier, but scores of pruned experts cannot be compared: prune once, "
            "at the sparsity that is wanted in the end"
        )
    if useless := next((type(other).__name__ for other in after if isinstance(other, PlanModifier)), None):
        raise CoverageError(f"{useless} stands after ChannelPruningModifier, where it changes nothing: put it before")
    first = next(index for index, other in enumerate(before) if isinstance(other, AttributionModifier))
    if any(isinstance(other, REAPPruningModifier) for other in (*before[first:], *after)):
        raise CoverageError(
            "REAPPruningModifier stands after AttributionModifier and would renumber the experts that it scored: put "
            "it before AttributionModifier"
        )


def check_routable(block: ExpertBlock, widths_E: Tensor) -> None:
    """Refuse a plan that leaves a router fewer experts than it picks; group-limited routers pick within groups.

    Raises:
        CoverageError: as said, with the block, or the group, that is too small.
    """
    live_E = widths_E > 0
    groups, picked_groups = getattr(block.router, "n_group", None) or 1, getattr(block.router, "topk_group", None) or 1
    live_G = live_E.reshape(groups, -1).sum(-1)
    # a group is scored by its best two experts, so one alone would never be reached
    needed = max(-(-block.top_k // picked_groups), 2 if groups > 1 else 1)
    if bool((live_G < needed).any()):
        raise CoverageError(
            f"{block.name} would keep {int(live_G.min())} experts in a group of its router, which needs {needed}: "
            "lower sparsity or min_width"
        )


def _common_divisor(model: PreTrainedModel, block_size: int) -> int:
    """What all widths are multiples of, those of layers left as they were included."""
    return math.gcd(block_size, *(width for block in find_expert_blocks(model) for width in block.widths))


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def block_linears(block: ExpertBlock) -> list[Linear]:
    """All projections of all experts of a block."""
    return [linear for mlp in block.mlps for linear in projections(mlp).values()]


def _tokenizer_of_run() -> Callable[[Path], None] | None:
    run = running_oneshot()
    processor: Any = run.processor if run is not None else None
    return None if processor is None else lambda directory: processor.save_pretrained(directory)


def _report(plan: WidthPlan, widths_LE: Tensor) -> dict[str, Any]:
    """Figures of a pruning, per block, for the file beside the checkpoint."""
    prefix_LEN = prefix_scores(plan.scores.channels_LEI)
    kept_LE = prefix_LEN.gather(-1, widths_LE.unsqueeze(-1)).squeeze(-1)
    coverage_L = kept_LE.sum(-1) / prefix_LEN[..., -1].sum(-1).clamp(min=torch.finfo(torch.float64).tiny)
    blocks = {
        name: {
            "widths": widths_LE[layer].tolist(),
            "tokens": plan.scores.tokens_LE[layer].tolist(),
            "coverage": float(coverage_L[layer]),
        }
        for layer, name in enumerate(plan.scores.names)
    }
    kept_for_layout = int(((plan.widths_LE == 0) & (widths_LE > 0)).sum())
    return {
        "blocks": blocks,
        "experts_without_tokens": plan.scores.unreached,
        "experts_kept_for_layout": kept_for_layout,
        "plan": plan.notes,
    }
