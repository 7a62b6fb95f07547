"""Collects the statistics of one expert block through forward hooks, over routed and real tokens only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.utils import align_module_device
from llmcompressor.modeling.moe.context import get_calibrate_all_experts_flag
from llmcompressor.modeling.moe.linear_experts import ExpertMLP
from torch import Tensor
from torch.nn import Module

from moe_coverage_plugin.calibration.distributed import sum_over_ranks
from moe_coverage_plugin.calibration.expert_blocks import PROJECTIONS, ExpertBlock, uniform_shape
from moe_coverage_plugin.calibration.layer_loss import non_finite_activations
from moe_coverage_plugin.calibration.scores import AttributionScores
from moe_coverage_plugin.core.ragged import ExpertWeights
from moe_coverage_plugin.core.statistics import (
    ChannelMetric,
    channel_sums,
    expert_contributions,
    finalize_channel_scores,
)


class BlockObserver:
    """Running sums of one block: tokens and routing weights, squares of channels, contributions of experts.

    Within a batch the hooks run in this order: :meth:`on_routing` before the experts, :meth:`on_expert` for each,
    :meth:`on_output` when the block's output is known. An expert sees its tokens ordered by slot of the top-k first.
    """

    def __init__(
        self, block: ExpertBlock, metric: ChannelMetric, ema: float | None, real_tokens: Callable[[int], Tensor | None]
    ):
        """
        Args:
            ema: decay of an exponential moving average of the batch sums; ``None`` adds them.
            real_tokens: for the batch in flight and its number of tokens, the mask of those that are no padding.
        """
        self.block = block
        self.metric: ChannelMetric = metric
        self.ema = ema
        self.real_tokens = real_tokens
        self.sums: dict[str, Tensor] = {}
        self._batch: dict[str, Tensor] = {}
        self._routing: tuple[Tensor, Tensor, Tensor] | None = None
        self._outputs: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def on_routing(self, _module: Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of the experts: hidden states ``[T, H]``, chosen experts and their weights ``[T, K]``."""
        x_TH, topk_ids_TK, topk_weights_TK = args[:3]
        x_TH = x_TH.reshape(-1, x_TH.shape[-1])
        self._routing = x_TH, topk_ids_TK, topk_weights_TK
        experts, channels = uniform_shape([self.block])
        shapes: dict[str, tuple[int, ...]] = {
            "tokens_E": (experts,),
            "gate_sum_E": (experts,),
            "first_order_E": (experts,),
            "second_order_E": (experts,),
        }
        shapes["channel_sums_EI"] = (experts, channels)
        if self.metric == "weight_activation":
            shapes["input_sums_EH"] = (experts, x_TH.shape[-1])
        self._batch = {name: x_TH.new_zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        self._outputs = {}

    def on_expert(self, index: int, _module: Module, args: tuple[Tensor, ...], z: Tensor) -> None:
        """Forward hook of an expert's ``down_proj``: its input is the activation ``A``, its output ``z``."""
        assert self._routing is not None
        x_TH, topk_ids_TK, topk_weights_TK = self._routing
        slot_N, token_N = torch.where((topk_ids_TK == index).T)
        # an all-experts pass shows the expert every token; only its own count
        row_N = token_N if get_calibrate_all_experts_flag() else torch.arange(token_N.numel(), device=token_N.device)
        if (real_T := self.real_tokens(x_TH.shape[0])) is not None:
            real_N = real_T.to(token_N.device)[token_N]
            slot_N, token_N, row_N = slot_N[real_N], token_N[real_N], row_N[real_N]
        if token_N.numel() == 0:
            return
        gate_N = topk_weights_TK[token_N, slot_N]
        self._batch["tokens_E"][index] = token_N.numel()
        self._batch["gate_sum_E"][index] = gate_N.sum(dtype=torch.float64)
        self._batch["channel_sums_EI"][index] = channel_sums(args[0][row_N])
        if self.metric == "weight_activation":
            self._batch["input_sums_EH"][index] = channel_sums(x_TH[token_N])
        self._outputs[index] = z[row_N], gate_N, token_N

    def on_output(self, _module: Module, _args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        """Forward hook of the whole block: its output ``y`` completes the batch."""
        y = output[0] if isinstance(output, tuple) else output
        y_TH = y.reshape(-1, y.shape[-1])
        for index, (z_NH, gate_N, token_N) in self._outputs.items():
            contributions = expert_contributions(z_NH, gate_N, y_TH[token_N])
            self._batch["first_order_E"][index] = contributions.first_order
            self._batch["second_order_E"][index] = contributions.second_order
        self._add_batch()
        self._routing, self._outputs, self._batch = None, {}, {}

    def _add_batch(self) -> None:
        reached_E = self._batch["tokens_E"] > 0
        if not self.sums:
            self.sums = {name: torch.zeros_like(batch) for name, batch in self._batch.items()}
        seen_E = self.sums["tokens_E"] > 0
        for name, batch in self._batch.items():
            total = self.sums[name]
            if self.ema is None or name in ("tokens_E", "gate_sum_E"):
                total += batch
                continue
            averaged = torch.where(_like(seen_E, batch), self.ema * total + (1 - self.ema) * batch, batch)
            self.sums[name] = torch.where(_like(reached_E, batch), averaged, total)

    def check_finite(self, sums: Mapping[str, Tensor] | None = None) -> None:
        """Refuse activations that are no numbers, in this rank's sums or in the given ones.

        Raises:
            CoverageError: naming the block and the first such expert.
        """
        sums = self.sums if sums is None else sums
        for name in ("channel_sums_EI", "second_order_E"):
            if name in sums and not bool(torch.isfinite(sums[name]).all()):
                bad_E = ~torch.isfinite(sums[name]).reshape(self.block.num_experts, -1).all(-1)
                raise non_finite_activations(f"{self.block.name} expert {int(bad_E.nonzero()[0])}")

    def channel_scores(self, sums: dict[str, Tensor]) -> Tensor:
        """Final channel scores ``[E, I]``, float64 on the CPU, from the sums of all ranks."""
        inputs_EH = sums.get("input_sums_EH")
        return torch.stack(
            [
                finalize_channel_scores(
                    self.metric,
                    sums["channel_sums_EI"][index],
                    expert_weights(mlp) if self.metric != "activation" else None,
                    inputs_EH[index] if inputs_EH is not None else None,
                )
                for index, mlp in enumerate(self.block.mlps)
            ]
        )


def gather_scores(observers: Sequence[BlockObserver], layer_loss_L: Tensor | None) -> AttributionScores:
    """Sum the statistics of all observers over all ranks and turn them into scores."""
    for observer in observers:
        assert observer.sums, f"{observer.block.name} saw no batch"
    sums_L = [sum_over_ranks({name: total.cpu() for name, total in observer.sums.items()}) for observer in observers]
    # after the exchange, so that all ranks refuse together and none waits for another
    for observer, sums in zip(observers, sums_L, strict=True):
        observer.check_finite(sums)
    return AttributionScores(
        names=[observer.block.name for observer in observers],
        top_k=[observer.block.top_k for observer in observers],
        channels_LEI=torch.stack(
            [observer.channel_scores(sums) for observer, sums in zip(observers, sums_L, strict=True)]
        ),
        first_order_LE=torch.stack([sums["first_order_E"] for sums in sums_L]),
        second_order_LE=torch.stack([sums["second_order_E"] for sums in sums_L]),
        tokens_LE=torch.stack([sums["tokens_E"].long() for sums in sums_L]),
        gate_sum_LE=torch.stack([sums["gate_sum_E"] for sums in sums_L]),
        layer_loss_L=layer_loss_L,
    )


def expert_weights(mlp: ExpertMLP) -> ExpertWeights:
    """Copies of an expert's weights and biases, on the CPU where they are offloaded."""
    linears = [getattr(mlp, name) for name in PROJECTIONS]
    weights, biases = [], []
    for linear in linears:
        with align_module_device(linear):
            weights.append(linear.weight.detach().clone())
            biases.append(None if linear.bias is None else linear.bias.detach().clone())
    return ExpertWeights(*weights, *biases)


def _like(flags_E: Tensor, tensor: Tensor) -> Tensor:
    return flags_E.reshape(-1, *[1] * (tensor.ndim - 1))
