"""ALA: attribution-guided layer-local analysis (paper), the scores that plans are made from."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.distributed import is_distributed, is_source_process
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger
from pydantic import PrivateAttr
from torch import Tensor
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration import interactions, layer_loss, observation
from moe_coverage_plugin.calibration.calibration_set import check_batches, data_hash
from moe_coverage_plugin.calibration.distributed import gather_over_ranks
from moe_coverage_plugin.calibration.gathering import attribution_scores, channel_scores, gather_sums
from moe_coverage_plugin.calibration.gradients import GradientObserver
from moe_coverage_plugin.calibration.kept_sums import SUMS
from moe_coverage_plugin.calibration.layerwise import check_layers
from moe_coverage_plugin.calibration.observer import LayerObserver
from moe_coverage_plugin.calibration.provenance import (
    check_scores,
    check_writable,
    environment,
    routers_hash,
    text_provenance,
)
from moe_coverage_plugin.core.scores import TOKEN_FLOOR, AttributionScores
from moe_coverage_plugin.files.progress import Progress
from moe_coverage_plugin.files.scores import load_scores, save_scores
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.causal_mask import mark_causal_attention, unmark_causal_attention
from moe_coverage_plugin.modeling.compute_dtype import choose_compute_dtype, fast_compute_dtype
from moe_coverage_plugin.modeling.expert_lists import linearize_expert_lists
from moe_coverage_plugin.modeling.loaded_weights import check_finite, check_loaded
from moe_coverage_plugin.modeling.moe_layers import MoELayer, find_moe_layers, router_needs, uniform_shape
from moe_coverage_plugin.modifiers.attribution_checks import (
    check_memory,
    check_predicted_tokens,
    refuse_pruned,
    refuse_quantized,
)
from moe_coverage_plugin.modifiers.float32_passes import choose_dtype_of_passes
from moe_coverage_plugin.modifiers.kept_layers import KEPT_LAYERS
from moe_coverage_plugin.modifiers.oneshot_run import prepare, recipe_around, refuse_shared_pass
from moe_coverage_plugin.modifiers.resumption import run_progress
from moe_coverage_plugin.modifiers.run_bar import run_bar
from moe_coverage_plugin.options import AttributionOptions

# name of the measured scores in the progress of a run
SCORES = "scores"


class AttributionModifier(AttributionOptions, Modifier):
    """Scores channels, experts and layers on calibration data; changes no weight.

    An expert's scores count only the tokens that the router sent to it, whether or not ``moe_calibrate_all_experts``
    shows it others. Padding never counts, and tokens whose ``labels`` are -100 are not predicted. Metrics without
    gradients cost one forward pass. Gradients cost one pass forward and backward through the head of the model;
    weights get no gradients, and only the input of each decoder layer is kept. ``obs`` costs one more forward pass,
    layer by layer. ``layer_noise`` costs one more forward pass over ``layer_batches`` batches for each layer. Fields
    and their defaults: :class:`~moe_coverage_plugin.options.AttributionOptions`.

    Lifecycle:

    - on_initialize
        - stop if weights of the model are missing, unused, NaN or infinite
        - find the MoE layers, and stop if they are pruned or quantized already
        - if ``scores`` is set: read the scores and check that they belong to this model
        - otherwise: check the calibration data, and the memory for ``obs``
        - let passes compute in float32 if the model is in bfloat16 and the processor is slow in it
    - on_calibration_start
        - for ``obs`` and for reconstruction: check that decoder layers can be called one by one, and that there is
          memory for hidden states
        - run the calibration data through the model and score channels, experts and layers
        - if ``save_scores`` is set: write the scores
    - on_calibration_end
        - warn of experts with few or no calibration tokens
    - on_finalize
        - remove the mark that keeps attention causal, and the compute dtype, from the passes of the toolkit

    Example recipe::

        AttributionModifier:
          channel_metric: fisher
    """

    # it makes its own pass over the data, so the toolkit need not
    requires_calibration_data: bool = False

    _passes: ExitStack = PrivateAttr(default_factory=ExitStack)
    _layers: list[MoELayer] = PrivateAttr(default_factory=list)
    _measured: AttributionScores | None = PrivateAttr(default=None)
    _provenance: dict[str, Any] = PrivateAttr(default_factory=dict)
    # whether a modifier of the recipe will take the model layer by layer
    _reconstructs: bool = PrivateAttr(default=False)

    @property
    def layers(self) -> list[MoELayer]:
        """The observed MoE layers, in layer order."""
        return self._layers

    @property
    def intermediate_size(self) -> int:
        """Channels of every observed expert."""
        return uniform_shape(self._layers)[1]

    @property
    def measured(self) -> AttributionScores:
        """The scores, available after this modifier's pass."""
        assert self._measured is not None, "AttributionModifier has not run yet"
        return self._measured

    @property
    def provenance(self) -> dict[str, Any]:
        """The model, data and versions that the scores were measured with."""
        return self._provenance

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        """Find the layers and check model, data and files."""
        prepare(self)
        if self.ema is not None and is_distributed():
            raise CoverageError(
                f"ema={self.ema} averages in the order of batches, which ranks do not share: leave ema out"
            )
        self._reconstructs = any(getattr(other, "reconstruct", False) for other in recipe_around(self)[1])
        check_loaded(state.model)
        linearize_expert_lists(state.model)
        self._layers = find_moe_layers(state.model, self.ignore)
        check_loaded(state.model, [layer.router for layer in self._layers])
        refuse_pruned(state.model, self._layers)
        uniform_shape(self._layers)
        refuse_quantized(state.model, self._layers, recipe_around(self)[0])
        check_finite(state.model)
        if self.scores is not None:
            self._take_scores(self.scores)
        else:
            check_batches(state.data.calib)
            check_memory(self, self._layers)
            if self.uses_gradients or self.layer_noise is not None:
                assert state.data.calib is not None
                # the state of the random generator is restored, so that the pass draws the same samples
                with torch.random.fork_rng(devices=[]):
                    check_predicted_tokens(self, list(state.data.calib))
        if self.save_scores is not None:
            check_writable(Path(self.save_scores))
        mark_causal_attention(state.model)
        self._passes = choose_dtype_of_passes(self, state.model)
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        """Measure, unless the scores are from a file."""
        refuse_shared_pass(self)
        if self.scores is not None:
            return
        # an earlier modifier may have removed experts since the recipe initialized
        self._layers = find_moe_layers(state.model, self.ignore)
        uniform_shape(self._layers)
        assert state.data.calib is not None
        # the toolkit draws the samples again for its own pass, which must see these, in this order
        with torch.random.fork_rng(devices=[]):
            batches = list(state.data.calib)
        check_predicted_tokens(self, batches)
        self._provenance = self._describe(state.model, batches)
        if (text := text_provenance(state.data.calib)) is not None:
            self._provenance["calibration_text"] = text
        progress = run_progress(state.model, batches)
        # a pass before this one enables the quantizers that follow, which are not calibrated yet
        with DisableQuantization(state.model), fast_compute_dtype(state.model), run_bar(len(batches)):
            if self.channel_metric == "obs" or self._reconstructs:
                check_layers(state.model, self._layers, batches)
            self._measured = self._measure(state.model, batches, progress)
        if self.save_scores is not None and is_source_process():
            save_scores(self.save_scores, self._measured, self._provenance)

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        """Warn of experts and channels whose scores rest on few calibration tokens."""
        measured = self.measured
        for name, experts in measured.unreached.items():
            logger.warning(f"No calibration token reached experts {experts} of {name}: their scores are zero")
        for name, experts in measured.reached_by_fewer_than(TOKEN_FLOOR).items():
            fewest = int(measured.tokens_LE[measured.names.index(name)][experts].min())
            logger.warning(
                f"Fewer than {TOKEN_FLOOR} calibration tokens reached experts {experts} of {name}: their scores are "
                f"uncertain, calibrate on {-(-TOKEN_FLOOR // fewest)} times as much text, or on more varied text"
            )
        count = sum(map(len, measured.unreached.values()))
        logger.info(f"Observed {measured.tokens_LE.numel()} experts, {count} of them without a token")
        if (certainty := measured.certainty) is not None:
            logger.info(certainty)

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        """Remove the mark that keeps attention causal, and the compute dtype."""
        self._passes.close()
        unmark_causal_attention(state.model)
        return True

    def passes(self, batches: int) -> dict[str, float]:
        """Return the costs of the passes (see :func:`~moe_coverage_plugin.modifiers.run_bar.run_bar`)."""
        if self.scores is not None:
            return {}
        # with gradients, layers compute twice, and the backward pass costs three forward passes (docs/scaling.md)
        costs = {observation.GRADIENTS: 5.0} if self.uses_gradients else {observation.OBSERVING: 1.0}
        if self.channel_metric == "obs":
            costs[interactions.TITLE] = interactions.COST
        if self.layer_noise is not None:
            costs[layer_loss.TITLE] = (len(self._layers) + 1) * min(self.layer_batches, batches) / batches
        return costs

    def _take_scores(self, path: str) -> None:
        self._measured, self._provenance = load_scores(path)
        check_scores(path, self._measured, self._provenance, self._layers)
        # files of earlier releases lack what routers need
        self._measured = replace(self._measured, routers=[router_needs(layer) for layer in self._layers])
        stored = self._measured.channel_metric
        # "own" cannot be written in a recipe, so the recipe of such a run has the default
        listed_default = stored == "own" and self.channel_metric == type(self).model_fields["channel_metric"].default
        if "channel_metric" in self.model_fields_set and self.channel_metric != stored and not listed_default:
            raise CoverageError(
                f"{path} has {stored} scores, but channel_metric={self.channel_metric!r} is set: leave channel_metric "
                "out, or scores"
            )
        if stored != "own":
            # the recipe that is written beside the checkpoint has the metric of the scores
            self.channel_metric = stored

    def _measure(
        self, model: PreTrainedModel, batches: list[dict[str, Tensor]], progress: Progress | None
    ) -> AttributionScores:
        if progress is not None and (measured := _kept_scores(progress)) is not None:
            return measured
        observers = [LayerObserver(layer, self.channel_metric, self.ema) for layer in self._layers]
        gradients = [GradientObserver(layer, self.channel_metric) for layer in self._layers if self.uses_gradients]
        observation.observe_batches(model, batches, observers, gradients, self.labels, progress)
        sums_L = gather_sums(observers, gradients)
        if self.channel_metric == "obs":
            channels_LEI = interactions.interaction_scores(model, self._layers, batches, sums_L, progress)
        else:
            channels_LEI = channel_scores(observers, gradients, sums_L)
        layer_loss_L = None
        if self.layer_noise is not None:
            layer_loss_L = layer_loss.layer_loss_rise(
                model, self._layers, batches[: self.layer_batches], self.layer_noise
            )
        measured = attribution_scores(observers, sums_L, channels_LEI, layer_loss_L)
        if progress is not None:
            save_scores(progress.place(SCORES), measured, self._provenance)
            # what they were computed from, and what was computed from earlier ones
            progress.drop(SUMS, interactions.SCORES, KEPT_LAYERS)
        return measured

    def _describe(self, model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
        return {
            "model": model.config._name_or_path,
            "routers_sha256": routers_hash(self._layers),
            "calibration_sha256": data_hash(batches),
            "calibration_batches": sum(gather_over_ranks(len(batches))),
            "compute_dtype": str(choose_compute_dtype(model).dtype).removeprefix("torch."),
            "attribution": self.model_dump(exclude={*Modifier.model_fields, "scores", "save_scores"}),
            **environment(),
        }


def _kept_scores(progress: Progress) -> AttributionScores | None:
    """The scores that an equal run has measured."""
    if (path := progress.kept(SCORES)) is None:
        return None
    try:
        measured, _ = load_scores(path)
    except CoverageError:
        progress.discard(SCORES)
        return None
    logger.info("Going on with the scores of all layers")
    return measured
