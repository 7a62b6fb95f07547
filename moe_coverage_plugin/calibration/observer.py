"""Statistics of one MoE layer that need no gradient, over routed tokens without padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from compressed_tensors.utils import align_module_device
from llmcompressor.modeling.moe.linear_experts import ExpertMLP
from torch import Tensor
from torch.nn import Module

from moe_coverage_plugin.core.attribution import (
    expert_contributions,
    finalize_channel_scores,
    segment_sums,
    squares,
)
from moe_coverage_plugin.core.ragged import ExpertWeights
from moe_coverage_plugin.expert_scheme import PROJECTIONS
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.grouped_experts import ExpertTrace
from moe_coverage_plugin.modeling.moe_layers import MoELayer
from moe_coverage_plugin.options import GRADIENT_METRICS, ChannelMetric


class LayerObserver:
    """Running sums of one layer: tokens and routing weights, squares of channels, contributions of experts.

    In each batch :meth:`observe` is called with the values inside the experts, then :meth:`on_output` with the output
    of the layer.
    """

    def __init__(self, layer: MoELayer, metric: ChannelMetric, ema: float | None):
        """Create an observer without sums.

        Args:
            layer: the layer to observe.
            metric: for metrics from gradients this observer keeps no sums of channels.
            ema: decay of an exponential moving average of the batch sums; ``None`` adds them.
        """
        self.layer = layer
        self.metric: ChannelMetric = metric
        self.ema = ema
        self.sums: dict[str, Tensor] = {}
        self._batch: dict[str, Tensor] = {}
        self._trace: ExpertTrace | None = None

    def observe(self, trace: ExpertTrace) -> None:
        """Compute the sums of a batch from the values inside the experts."""
        routing = trace.routing
        self._trace = trace
        routing_weights_M = routing.real(routing.routing_weights_M)
        self._batch = {
            "tokens_E": routing.real_lengths_E.double(),
            "routing_weight_sum_E": segment_sums(routing_weights_M, routing.real_lengths_E),
        }
        if self.metric not in GRADIENT_METRICS:
            self._batch["channel_sums_EI"] = segment_sums(squares(routing.real(trace.a_MI)), routing.real_lengths_E)
        if self.metric == "weight_activation":
            self._batch["input_sums_EH"] = segment_sums(squares(routing.real(trace.x_MH)), routing.real_lengths_E)

    def on_output(self, _module: Module, _args: tuple[Any, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        """Forward hook of the layer: add the contributions of experts to its output ``y``."""
        y = output[0] if isinstance(output, tuple) else output
        y_TH = y.detach().reshape(-1, y.shape[-1])
        assert self._trace is not None
        routing, z_MH = self._trace.routing, self._trace.z_MH
        contributions = expert_contributions(
            routing.real(z_MH), routing.real(routing.routing_weights_M), y_TH, routing.real(routing.tokens_M)
        )
        self._batch["first_order_E"] = segment_sums(contributions.first_order_M, routing.real_lengths_E)
        self._batch["second_order_E"] = segment_sums(contributions.second_order_M, routing.real_lengths_E)
        self._trace = None

    def end_batch(self) -> None:
        """Add the sums of the batch.

        Raises:
            CoverageError: activations are NaN or infinite; the message names the layer and its first such expert.
        """
        sums, self._batch = self._batch, {}
        assert sums, f"{self.layer.name} saw no batch"
        self.check_finite(sums)
        reached_E = sums["tokens_E"] > 0
        if not self.sums:
            self.sums = {name: torch.zeros_like(batch) for name, batch in sums.items()}
        # sums that an earlier run has kept are on the CPU
        self.sums = {name: total.to(sums[name].device) for name, total in self.sums.items()}
        seen_E = self.sums["tokens_E"] > 0
        for name, batch in sums.items():
            total = self.sums[name]
            if self.ema is None or name in ("tokens_E", "routing_weight_sum_E"):
                total += batch
                continue
            averaged = torch.where(_like(seen_E, batch), self.ema * total + (1 - self.ema) * batch, batch)
            self.sums[name] = torch.where(_like(reached_E, batch), averaged, total)

    def check_finite(self, sums: Mapping[str, Tensor]) -> None:
        """Check that sums over activations are finite.

        Raises:
            CoverageError: they are not; the message names the layer and its first such expert.
        """
        for name in ("channel_sums_EI", "second_order_E"):
            if name in sums and not bool(torch.isfinite(sums[name]).all()):
                bad_E = ~torch.isfinite(sums[name]).reshape(self.layer.num_experts, -1).all(-1)
                raise non_finite_activations(f"{self.layer.name} expert {int(bad_E.nonzero()[0])}")

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
                for index, mlp in enumerate(self.layer.mlps)
            ]
        )


def non_finite_activations(culprit: str) -> CoverageError:
    """The error for an expert whose activations are NaN or infinite.

    Args:
        culprit: the expert, for the message.
    """
    return CoverageError(
        f"{culprit} has NaN or infinite activations on the calibration set: check its weights, and calibrate in a "
        "dtype with enough range (bfloat16 rather than float16)"
    )


def expert_weights(mlp: ExpertMLP) -> ExpertWeights:
    """Copies of an expert's weights and biases; those of an offloaded expert are on the CPU."""
    linears = [getattr(mlp, name) for name in PROJECTIONS]
    weights, biases = [], []
    for linear in linears:
        with align_module_device(linear):
            weights.append(linear.weight.detach().clone())
            biases.append(None if linear.bias is None else linear.bias.detach().clone())
    return ExpertWeights(*weights, *biases)


def _like(flags_E: Tensor, tensor: Tensor) -> Tensor:
    return flags_E.reshape(-1, *[1] * (tensor.ndim - 1))
