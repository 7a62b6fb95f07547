"""ALA: attribution-guided layer-local analysis, the scores that budgets are made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch
from compressed_tensors.distributed import is_distributed, is_source_process
from compressed_tensors.quantization.utils import is_module_quantized
from llmcompressor.core import Event, State
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger
from pydantic import Field, PrivateAttr
from torch import Tensor
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.distributed import gather_over_ranks
from moe_coverage_plugin.calibration.gathering import gather_scores
from moe_coverage_plugin.calibration.gradients import GradientObserver, obs_bytes
from moe_coverage_plugin.calibration.layer_loss import layer_loss_rise
from moe_coverage_plugin.calibration.next_token import check_predicted
from moe_coverage_plugin.calibration.observation import observe_batches
from moe_coverage_plugin.calibration.observer import LayerObserver
from moe_coverage_plugin.calibration.provenance import check_scores, check_writable, environment, routers_hash
from moe_coverage_plugin.calibration.token_mask import check_batches, data_hash
from moe_coverage_plugin.checkpoint.saving import PruningRecord
from moe_coverage_plugin.core.attribution import ChannelMetric, ExpertImportance
from moe_coverage_plugin.core.gradients import GRADIENT_METRICS, NLL_IMPORTANCES
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.files.scores import load_scores, save_scores
from moe_coverage_plugin.manifest import CoverageError, report_layers
from moe_coverage_plugin.modeling.causal_mask import forget_causal_mask, keep_causal_mask
from moe_coverage_plugin.modeling.expert_lists import linearize_expert_lists
from moe_coverage_plugin.modeling.moe_layers import MoELayer, find_moe_layers, projections, uniform_shape
from moe_coverage_plugin.modifiers.oneshot_run import prepare, recipe_around, refuse_shared_pass

# below so many tokens an expert's scores hang on which ones they were
TOKEN_FLOOR = 32


class AttributionModifier(Modifier):
    """Observes experts on calibration data and scores their channels, the experts and the layers. Changes no weight.

    Only tokens that the router sent to an expert count for it, whether or not ``moe_calibrate_all_experts`` shows it
    others, and padding never counts. What needs no gradient costs one forward pass. Gradients cost one pass forward
    and backward instead, through the model's head; weights get none, and of each decoder layer only its input is kept.
    Tokens whose ``labels`` are -100 are not predicted in it. The loss of fading layers costs one forward pass over
    ``layer_batches`` batches for every layer besides.

    Args:
        channel_metric: without gradients ``activation`` (L2 norm of the channel over the expert's tokens, the paper's
            default), ``weight`` (L2 norms of its weights) or ``weight_activation`` (weights times input norms). From
            gradients ``fisher`` (``sum_t (A dNLL/dA)^2``, comparable between layers), ``obs`` (the same where other
            channels take over, for ``reconstruct: true`` only: worse than ``fisher`` without; takes
            ``8 * experts * channels^2`` bytes of CPU memory for every layer; see ``core/obs.py``), and the
            paper's ``gradient``, ``activation_gradient`` and ``snip`` (see ``core/gradients.py``).
        expert_importance: in closed form, at no extra cost, ``first_order`` (the paper's attribution) or
            ``second_order`` (the exact loss of removing the expert). From gradients ``nll_signed``, ``nll_absolute``
            or ``nll_squared``: ``sum_t u_t`` with its sign reversed, of ``|u_t|``, or of ``u_t^2``, where
            ``u_t = <dNLL/dz_t, z_t>``.
        layer_noise: how far a layer's output fades when its importance is measured, in (0, 1]; 1 removes it. ``None``:
            not measured.
        layer_batches: how many calibration batches measure the layers, on each rank.
        ema: decay of an exponential moving average over batches, as in the paper's code; ``None``: plain sums.
        ignore: MoE layers to leave whole: names, classes or ``re:`` patterns of them or of modules around them.
        scores: file of an earlier run on the same model to take the scores from; nothing is measured then, and what
            the file holds counts for the fields that say what to measure.
        save_scores: file to write the scores to as soon as they are measured. A copy lies beside every checkpoint.

    Example recipe::

        AttributionModifier:
          channel_metric: activation
    """

    # its pass over the data is its own, not one of the toolkit's
    requires_calibration_data: bool = False

    channel_metric: ChannelMetric = "activation"
    expert_importance: ExpertImportance = "first_order"
    layer_noise: float | None = 1.0
    layer_batches: int = 16
    ema: float | None = None
    ignore: list[str] = Field(default_factory=list)
    scores: str | None = None
    save_scores: str | None = None

    _layers: list[MoELayer] = PrivateAttr(default_factory=list)
    _measured: AttributionScores | None = PrivateAttr(default=None)
    _provenance: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def layers(self) -> list[MoELayer]:
        """The MoE layers that are observed, in layer order."""
        return self._layers

    @property
    def intermediate_size(self) -> int:
        """Channels of every observed expert."""
        return uniform_shape(self._layers)[1]

    @property
    def measured(self) -> AttributionScores:
        """The scores, once this modifier's pass has ended."""
        assert self._measured is not None, "AttributionModifier has not run yet"
        return self._measured

    @property
    def provenance(self) -> dict[str, Any]:
        """What the scores were measured on and with."""
        return self._provenance

    @property
    def uses_gradients(self) -> bool:
        """Whether a pass forward and backward is needed."""
        return self.channel_metric in GRADIENT_METRICS or self.expert_importance in NLL_IMPORTANCES

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        prepare(self)
        self._check_options()
        linearize_expert_lists(state.model)
        self._layers = find_moe_layers(state.model, self.ignore)
        self._refuse_pruned(state.model)
        uniform_shape(self._layers)
        self._refuse_quantized(state.model)
        if self.scores is not None:
            self._take_scores(self.scores)
        else:
            check_batches(state.data.calib)
            self._check_memory()
            if self.uses_gradients or self.layer_noise is not None:
                assert state.data.calib is not None
                # what is drawn here is not what the pass will see, which draws as if nobody had
                with torch.random.fork_rng(devices=[]):
                    self._check_predicted(list(state.data.calib))
        if self.save_scores is not None:
            check_writable(Path(self.save_scores))
        keep_causal_mask(state.model)
        return True

    def on_finalize(self, state: State, **kwargs: Any) -> bool:
        forget_causal_mask(state.model)
        return True

    def _check_options(self) -> None:
        if self.layer_noise is not None and not 0.0 < self.layer_noise <= 1.0:
            raise CoverageError(
                f"layer_noise is {self.layer_noise}, it must be above 0 and at most 1, or None to leave it out"
            )
        if self.layer_batches < 1:
            raise CoverageError(f"layer_batches is {self.layer_batches}, at least 1 batch must measure the layers")
        if self.ema is not None and not 0.0 < self.ema < 1.0:
            raise CoverageError(f"ema is {self.ema}, a decay lies above 0 and below 1; None sums plainly")
        if self.ema is not None and self.uses_gradients:
            raise CoverageError(f"ema={self.ema} averages no gradients: leave it None, or choose metrics without them")
        if self.ema is not None and is_distributed():
            raise CoverageError(
                f"ema={self.ema} averages over the order of batches, which ranks do not share: leave it None"
            )

    def _check_predicted(self, batches: list[dict[str, Tensor]]) -> None:
        """Gradients of no loss are zeros, which would pass for scores."""
        if self.uses_gradients:
            options = f"channel_metric={self.channel_metric!r} with expert_importance={self.expert_importance!r}"
            check_predicted(batches, "all calibration batches", options)
        if self.layer_noise is not None:
            first = batches[: self.layer_batches]
            options = f"layer_noise={self.layer_noise} with layer_batches={self.layer_batches}"
            check_predicted(first, f"the first {len(first)} calibration batches", options)

    def _check_memory(self) -> None:
        """``obs`` may outgrow the machine, which would end the process in the middle of the pass."""
        if self.channel_metric != "obs":
            return
        experts, channels = uniform_shape(self._layers)
        needed = len(self._layers) * obs_bytes(experts, channels)
        free = psutil.virtual_memory().available
        if needed > free:
            raise CoverageError(
                f"channel_metric='obs' keeps {needed / 2**30:.2g} GiB of matrices in CPU memory, of which "
                f"{free / 2**30:.2g} GiB are free: choose 'fisher', or a machine with more memory"
            )

    def _refuse_pruned(self, model: PreTrainedModel) -> None:
        """Layers may be pruned in turn, each once; that their widths are equal does not say that they are whole."""
        record = getattr(model.save_pretrained, "_record", None)
        if not isinstance(record, PruningRecord):
            return
        # read from a file, which may say anything
        named = report_layers(record.report)
        # only ragged checkpoints leave layers out, and the record of a model pruned in turn names the last ones
        pruned = [
            layer.name
            for layer in self._layers
            if record.layout != "ragged" or layer.name in named or set(layer.widths) != {record.intermediate_size}
        ]
        if pruned:
            raise CoverageError(
                f"{pruned[0]} was pruned already ({len(pruned)} of {len(self._layers)} layers): scores of a model "
                "that was pruned before cannot be compared; prune the original model, or list these layers in ignore"
            )

    def _refuse_quantized(self, model: PreTrainedModel) -> None:
        before, _ = recipe_around(self)
        if quantizers := [type(other).__name__ for other in before if isinstance(other, QuantizationMixin)]:
            raise CoverageError(
                f"{quantizers[0]} stands before AttributionModifier: prune first, then quantize what is left"
            )
        linears = (
            (layer.name, linear)
            for layer in self._layers
            for mlp in layer.mlps
            for linear in projections(mlp).values()
        )
        quantized = next((name for name, linear in linears if is_module_quantized(linear)), None)
        if getattr(model, "is_loaded_in_4bit", False) or getattr(model, "is_loaded_in_8bit", False):
            quantized = f"{type(model).__name__} (by bitsandbytes)"
        if quantized is not None:
            raise CoverageError(
                f"{quantized} is quantized already: prune the 16-bit model, then quantize what is left"
            )

    def _take_scores(self, path: str) -> None:
        self._measured, self._provenance = load_scores(path)
        check_scores(path, self._measured, self._provenance, self._layers)
        if "channel_metric" in self.model_fields_set and self.channel_metric != self._measured.channel_metric:
            raise CoverageError(
                f"{path} holds {self._measured.channel_metric} scores and the recipe asks for {self.channel_metric}: "
                "leave channel_metric out, or scores"
            )

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        refuse_shared_pass(self)
        if self.scores is not None:
            return
        # an earlier modifier may have removed whole experts since the recipe initialized
        self._layers = find_moe_layers(state.model, self.ignore)
        uniform_shape(self._layers)
        assert state.data.calib is not None
        # the pass that follows draws its samples anew: it must see these, in this order
        with torch.random.fork_rng(devices=[]):
            batches = list(state.data.calib)
        self._check_predicted(batches)
        self._provenance = self._describe(state.model, batches)
        # a pass before this one turns on the quantizers that follow, and they are not calibrated yet
        with DisableQuantization(state.model):
            self._measured = self._measure(state.model, batches)
        if self.save_scores is not None and is_source_process():
            save_scores(self.save_scores, self._measured, self._provenance)

    def _measure(self, model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> AttributionScores:
        observers = [LayerObserver(layer, self.channel_metric, self.ema) for layer in self._layers]
        gradients = [GradientObserver(layer, self.channel_metric) for layer in self._layers if self.uses_gradients]
        observe_batches(model, batches, observers, gradients)
        layer_loss_L = None
        if self.layer_noise is not None:
            layer_loss_L = layer_loss_rise(model, self._layers, batches[: self.layer_batches], self.layer_noise)
        return gather_scores(observers, gradients, layer_loss_L)

    def _describe(self, model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> dict[str, Any]:
        return {
            "model": model.config._name_or_path,
            "routers_sha256": routers_hash(self._layers),
            "calibration_sha256": data_hash(batches),
            "calibration_batches": sum(gather_over_ranks(len(batches))),
            "attribution": self.model_dump(exclude={*Modifier.model_fields, "scores", "save_scores"}),
            **environment(),
        }

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        unreached = self.measured.unreached
        for name, experts in unreached.items():
            logger.warning(f"No calibration token reached experts {experts} of {name}: they score zero")
        for name, experts in self.measured.reached_by_fewer_than(TOKEN_FLOOR).items():
            logger.warning(
                f"Fewer than {TOKEN_FLOOR} calibration tokens reached experts {experts} of {name}: their scores are "
                "uncertain, calibrate on more or on more varied text"
            )
        count = sum(map(len, unreached.values()))
        logger.info(f"Observed {self.measured.tokens_LE.numel()} experts, {count} of them without a token")
