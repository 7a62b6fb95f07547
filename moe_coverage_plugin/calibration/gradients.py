"""Collects, for one expert block, what the gradient of the model's loss says about its channels and experts."""

from __future__ import annotations

from functools import partial

import torch
from compressed_tensors.utils import align_module_device
from torch import Tensor

from moe_coverage_plugin.calibration.expert_blocks import ExpertBlock, projections, uniform_shape
from moe_coverage_plugin.calibration.traced_experts import ExpertTrace
from moe_coverage_plugin.core.gradients import (
    NllSums,
    activation_gradient_terms,
    fisher_terms,
    gradient_terms,
    nll_terms,
    products,
    snip_scores,
)
from moe_coverage_plugin.core.statistics import ChannelMetric, segment_sums


class GradientObserver:
    """Running sums of one block over the gradients at its experts.

    Remembers the values that the experts computed, and adds to its sums when their gradients arrive.
    """

    def __init__(self, block: ExpertBlock, metric: ChannelMetric):
        self.block = block
        self.metric: ChannelMetric = metric
        experts, channels = uniform_shape([block])
        # the paper's metrics look at every projection, ours at the input of down_proj
        every = list(projections(block.mlps[0]))
        self._projections = every if metric in ("gradient", "activation_gradient", "snip") else ["down_proj"]
        self.sums = {
            "gradient_PEI": torch.zeros(len(self._projections), experts, channels, dtype=torch.float64),
            "nll_3E": torch.zeros(len(NllSums._fields), experts, dtype=torch.float64),
        }
        self._batch: dict[str, Tensor] = {}
        self._output_grad_MH: Tensor | None = None

    def observe(self, trace: ExpertTrace) -> None:
        """Wait for the gradients of what the experts computed."""
        if not trace.a_MI.requires_grad:
            return
        # hooks hold values without their graph, which would hold the hooks in turn
        lengths_E = trace.routing.lengths_E
        if self.metric == "snip" or self._has_bias:
            trace.z_MH.register_hook(self._on_output_grad)
        trace.a_MI.register_hook(partial(self._on_activation_grad, lengths_E, trace.a_MI.detach()))
        for name, value_MI in (("gate_proj", trace.gate_MI), ("up_proj", trace.up_MI)):
            if name in self._projections and value_MI is not None:
                known = (trace.x_MH.detach(), value_MI.detach())
                value_MI.register_hook(partial(self._on_projection_grad, name, lengths_E, *known))

    @property
    def _has_bias(self) -> bool:
        return projections(self.block.mlps[0])["down_proj"].bias is not None

    def _on_output_grad(self, grad_MH: Tensor) -> None:
        self._output_grad_MH = grad_MH

    def _on_activation_grad(self, lengths_E: Tensor, a_MI: Tensor, grad_MI: Tensor) -> None:
        products_MI = products(a_MI, grad_MI)
        u_M = products_MI.sum(-1, dtype=torch.float64)
        output_grad_MH, self._output_grad_MH = self._output_grad_MH, None
        if self._has_bias:
            assert output_grad_MH is not None
            u_M += self._bias_part(output_grad_MH, lengths_E)
        self._batch["nll"] = torch.stack([segment_sums(terms_M, lengths_E) for terms_M in nll_terms(u_M)])
        match self.metric:
            case "fisher":
                self._batch["down_proj"] = segment_sums(fisher_terms(products_MI), lengths_E)
            case "activation_gradient":
                self._batch["down_proj"] = segment_sums(activation_gradient_terms(products_MI), lengths_E)
            case "gradient":
                self._batch["down_proj"] = segment_sums(gradient_terms(grad_MI), lengths_E)
            case "snip":
                assert output_grad_MH is not None
                self._batch["down_proj"] = self._snip("down_proj", a_MI, output_grad_MH, lengths_E)

    def _on_projection_grad(
        self, name: str, lengths_E: Tensor, x_MH: Tensor, value_MI: Tensor, grad_MI: Tensor
    ) -> None:
        match self.metric:
            case "activation_gradient":
                self._batch[name] = segment_sums(activation_gradient_terms(products(value_MI, grad_MI)), lengths_E)
            case "gradient":
                self._batch[name] = segment_sums(gradient_terms(grad_MI), lengths_E)
            case "snip":
                self._batch[name] = self._snip(name, x_MH, grad_MI, lengths_E)

    def _bias_part(self, output_grad_MH: Tensor, lengths_E: Tensor) -> Tensor:
        """``<dNLL/dz, bias>`` of every row."""
        parts = []
        for mlp, grad_NH in zip(self.block.mlps, output_grad_MH.split(lengths_E.tolist()), strict=True):
            with align_module_device(linear := projections(mlp)["down_proj"]):
                parts.append(grad_NH.double() @ linear.bias.detach().double())
        return torch.cat(parts)

    def _snip(self, name: str, input_MA: Tensor, grad_MB: Tensor, lengths_E: Tensor) -> Tensor:
        scores = []
        rows = zip(self.block.mlps, input_MA.split(lengths_E.tolist()), grad_MB.split(lengths_E.tolist()), strict=True)
        for mlp, input_NA, grad_NB in rows:
            with align_module_device(linear := projections(mlp)[name]):
                scores.append(snip_scores(linear.weight, input_NA, grad_NB, channel_dim=int(name == "down_proj")))
        return torch.stack(scores)

    def end_batch(self, predicted: bool) -> None:
        """Add what the batch brought.

        Args:
            predicted: the loss of the batch is of any token, so that it has a gradient at the experts.
        """
        assert not predicted or "nll" in self._batch, f"no gradient of the loss arrived at {self.block.name}"
        for name, sums in self._batch.items():
            place = self.sums["nll_3E"] if name == "nll" else self.sums["gradient_PEI"][self._projections.index(name)]
            place += sums.cpu()
        self._batch = {}
