"""ALA: attribution-guided layer-local analysis, the scores that budgets are made from."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from compressed_tensors.distributed import is_distributed
from compressed_tensors.quantization.utils import is_module_quantized
from llmcompressor.core import Event, State, active_session
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.quantization import QuantizationMixin
from llmcompressor.utils.helpers import DisableQuantization
from loguru import logger
from pydantic import Field, PrivateAttr
from torch import Tensor

from moe_coverage_plugin.calibration.causal_mask import forget_causal_mask, keep_causal_mask
from moe_coverage_plugin.calibration.expert_blocks import ExpertBlock, find_expert_blocks, projections, uniform_shape
from moe_coverage_plugin.calibration.layer_loss import layer_loss_rise
from moe_coverage_plugin.calibration.observer import BlockObserver, gather_scores
from moe_coverage_plugin.calibration.scores import AttributionScores
from moe_coverage_plugin.calibration.token_mask import TokenMask, check_batches, data_hash
from moe_coverage_plugin.core.statistics import ChannelMetric, ExpertImportance
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modifiers.oneshot_run import prepare, recipe_around, refuse_shared_pass


class AttributionModifier(Modifier):
    """Observes experts on calibration data and scores their channels, the experts and the layers. Changes no weight.

    Only tokens that the router sent to an expert count for it, whether or not ``moe_calibrate_all_experts`` shows it
    others, and padding never counts. One forward pass, no gradients; the loss of fading layers costs one pass over
    ``layer_batches`` batches for every layer besides.

    Args:
        channel_metric: ``activation`` (L2 norm of the channel over the expert's tokens, the paper's default),
            ``weight`` (L2 norms of its weights) or ``weight_activation`` (weights times input norms).
        expert_importance: ``first_order`` (the paper's attribution) or ``second_order`` (the exact loss of removing
            the expert); both in closed form, at no extra cost.
        layer_noise: how far a layer's output fades when its importance is measured, in (0, 1]; 1 removes it. ``None``:
            not measured.
        layer_batches: how many calibration batches measure the layers.
        ema: decay of an exponential moving average over batches, as in the paper's code; ``None``: plain sums.
        ignore: expert blocks to leave whole: names, classes or ``re:`` patterns of them or of modules around them.

    Example recipe::

        AttributionModifier:
          channel_metric: activation
    """

    requires_calibration_data: bool = True

    channel_metric: ChannelMetric = "activation"
    expert_importance: ExpertImportance = "first_order"
    layer_noise: float | None = 1.0
    layer_batches: int = 16
    ema: float | None = None
    ignore: list[str] = Field(default_factory=list)

    _blocks: list[ExpertBlock] = PrivateAttr(default_factory=list)
    _observers: list[BlockObserver] = PrivateAttr(default_factory=list)
    _layer_loss_L: Tensor | None = PrivateAttr(default=None)
    _scores: AttributionScores | None = PrivateAttr(default=None)
    _calibration: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def blocks(self) -> list[ExpertBlock]:
        """The expert blocks that are observed, in layer order."""
        return self._blocks

    @property
    def intermediate_size(self) -> int:
        """Channels of every observed expert."""
        return uniform_shape(self._blocks)[1]

    @property
    def scores(self) -> AttributionScores:
        """The scores, once this modifier's pass has ended."""
        assert self._scores is not None, "AttributionModifier has not run yet"
        return self._scores

    @property
    def calibration(self) -> dict[str, Any]:
        """What the scores were measured on: hash of the token ids and number of batches."""
        return self._calibration

    @property
    def expert_scores(self) -> Tensor:
        """The chosen expert importance, ``[L, E]``."""
        first_order = self.expert_importance == "first_order"
        return self.scores.first_order_LE if first_order else self.scores.second_order_LE

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        prepare(self)
        self._check_options()
        self._blocks = find_expert_blocks(state.model, self.ignore)
        uniform_shape(self._blocks)
        self._refuse_quantized()
        check_batches(state.data.calib)
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
        if self.ema is not None and is_distributed():
            raise CoverageError(
                f"ema={self.ema} averages over the order of batches, which ranks do not share: leave it None"
            )

    def _refuse_quantized(self) -> None:
        before, _ = recipe_around(self)
        if quantizers := [type(other).__name__ for other in before if isinstance(other, QuantizationMixin)]:
            raise CoverageError(
                f"{quantizers[0]} stands before AttributionModifier: prune first, then quantize what is left"
            )
        linears = (
            (block.name, linear)
            for block in self._blocks
            for mlp in block.mlps
            for linear in projections(mlp).values()
        )
        if quantized := next((name for name, linear in linears if is_module_quantized(linear)), None):
            raise CoverageError(
                f"{quantized} is quantized already: prune the 16-bit model, then quantize what is left"
            )

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        refuse_shared_pass(self)
        # an earlier modifier may have removed whole experts since the recipe initialized
        self._blocks = find_expert_blocks(state.model, self.ignore)
        uniform_shape(self._blocks)
        assert state.data.calib is not None
        # the pass that follows draws its samples anew: it must see these, in this order
        with torch.random.fork_rng(devices=[]):
            batches = list(state.data.calib)
        self._calibration = {"calibration_sha256": data_hash(batches), "calibration_batches": len(batches)}
        if self.layer_noise is not None:
            chosen = batches[: self.layer_batches]
            # a pass before this one turns on the quantizers that follow, and they are not calibrated yet
            with DisableQuantization(state.model):
                self._layer_loss_L = layer_loss_rise(state.model, self._blocks, chosen, self.layer_noise)
        self._register_observers(state, TokenMask(batches))

    def _register_observers(self, state: State, token_mask: TokenMask) -> None:
        session_state = active_session().state

        def register(target: Any, hook: Any, kind: str) -> None:
            # the toolkit's signature says that hooks take one argument
            self.register_hook(target, hook, kind)

        def on_embedding(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            token_mask.on_embedding(session_state.current_batch_idx, module, args)

        def real_tokens(tokens: int) -> Tensor | None:
            return token_mask.of(session_state.current_batch_idx, tokens)

        register(state.model.get_input_embeddings(), on_embedding, "forward_pre")
        for block in self._blocks:
            observer = BlockObserver(block, self.channel_metric, self.ema, real_tokens)
            self._observers.append(observer)
            register(block.experts, observer.on_routing, "forward_pre")
            for index, mlp in enumerate(block.mlps):
                register(mlp.down_proj, partial(observer.on_expert, index), "forward")
            register(block.moe, observer.on_output, "forward")

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: list[torch.nn.Module], **kwargs: Any
    ) -> None:
        for observer in self._observers:
            observer.check_finite()

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        self.remove_hooks()
        self._scores = gather_scores(self._observers, self._layer_loss_L)
        self._observers.clear()
        unreached = self._scores.unreached
        for name, experts in unreached.items():
            logger.warning(f"No calibration token reached experts {experts} of {name}: they score zero")
        count = sum(map(len, unreached.values()))
        logger.info(f"Observed {self._scores.tokens_LE.numel()} experts, {count} of them without a token")
