"""Statistics of one MoE layer from gradients of the model's loss: scores of channels, importance of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from compressed_tensors.offload import get_execution_device
from compressed_tensors.utils import align_module_device
from torch import Tensor

from moe_coverage_plugin.core.attribution import segment_sums
from moe_coverage_plugin.core.gradients import (
    NllSums,
    activation_gradient_terms,
    active_rows,
    finalize_gradient_scores,
    fisher_terms,
    gradient_terms,
    nll_terms,
    products,
    snip_scores,
)
from moe_coverage_plugin.core.products import SIXTEEN_BITS, tf32_products
from moe_coverage_plugin.modeling.grouped_experts import ExpertTrace
from moe_coverage_plugin.modeling.moe_layers import MoELayer, projections, uniform_shape
from moe_coverage_plugin.modeling.routing import Routing
from moe_coverage_plugin.options import ChannelMetric


class GradientObserver:
    """Running sums of one layer over gradients at its experts.

    It keeps the values that the experts computed, and adds to its sums when their gradients arrive. For ``obs`` they
    are the diagonal of each expert's curvature, and the second moments of the gradients at the outputs of all experts,
    ``4 * H * H`` bytes on the device of the layer: 0.8 GB for 48 layers with a hidden size of 2048.
    """

    def __init__(self, layer: MoELayer, metric: ChannelMetric):
        self.layer = layer
        self.metric: ChannelMetric = metric
        experts, channels = uniform_shape([layer])
        # the paper's metrics use every projection, fisher and obs the input of down_proj
        every = list(projections(layer.mlps[0]))
        self._projections = every if metric in ("gradient", "activation_gradient", "snip") else ["down_proj"]
        down = projections(layer.mlps[0])["down_proj"]
        # on the device, because each copy to the CPU waits for it
        shapes = {
            "nll_3E": (len(NllSums._fields), experts),
            "gradient_UEI": (len(self._projections), experts, channels),
        }
        if metric in ("fisher", "obs"):
            shapes["squares_EI"] = (experts, channels)
        self.sums = {
            name: torch.zeros(shape, dtype=torch.float64, device=get_execution_device(down))
            for name, shape in shapes.items()
        }
        if metric == "obs":
            # also on a rank without any gradient, because ranks exchange these sums
            self.sums["output_HH"] = torch.zeros(
                down.out_features,
                down.out_features,
                dtype=torch.promote_types(down.weight.dtype, torch.float32),
                device=get_execution_device(down),
            )
        self._batch: dict[str, Tensor] = {}
        self._output_grad_MH: Tensor | None = None

    def observe(self, trace: ExpertTrace) -> None:
        """Register hooks on the values of a batch that wait for their gradients."""
        if not trace.a_MI.requires_grad:
            return
        # hooks keep detached values: a graph would keep the hooks in turn
        lengths_E, a_MI = trace.routing.lengths_E, trace.a_MI.detach()
        active_M = active_rows(a_MI)
        if self.metric == "snip" or self._has_bias:
            trace.z_MH.register_hook(self._on_output_grad)
        trace.a_MI.register_hook(partial(self._on_activation_grad, lengths_E, active_M, a_MI))
        if self.metric == "obs":
            routing = replace(trace.routing, routing_weights_M=trace.routing.routing_weights_M.detach())
            trace.z_MH.register_hook(partial(self._on_output_moments, routing, active_M))
        for name, value_MI in (("gate_proj", trace.gate_MI), ("up_proj", trace.up_MI)):
            if name in self._projections and value_MI is not None:
                known = (trace.x_MH.detach(), value_MI.detach())
                value_MI.register_hook(partial(self._on_projection_grad, name, lengths_E, active_M, *known))

    @property
    def _has_bias(self) -> bool:
        return projections(self.layer.mlps[0])["down_proj"].bias is not None

    def _on_output_grad(self, grad_MH: Tensor) -> None:
        self._output_grad_MH = grad_MH

    def _on_activation_grad(self, lengths_E: Tensor, active_M: Tensor, a_MI: Tensor, grad_MI: Tensor) -> None:
        products_MI = products(a_MI, grad_MI)
        u_M = products_MI.sum(-1, dtype=torch.float64)
        output_grad_MH, self._output_grad_MH = self._output_grad_MH, None
        if self._has_bias:
            assert output_grad_MH is not None
            u_M += self._bias_part(output_grad_MH, lengths_E)
        self._batch["nll"] = torch.stack([segment_sums(terms_M, lengths_E) for terms_M in nll_terms(u_M)])
        match self.metric:
            case "fisher":
                self._add_terms(fisher_terms(products_MI), lengths_E)
            case "activation_gradient":
                self._batch["down_proj"] = segment_sums(activation_gradient_terms(products_MI), lengths_E)
            case "obs":
                self._add_terms(gradient_terms(grad_MI, active_M), lengths_E)
            case "gradient":
                self._batch["down_proj"] = segment_sums(gradient_terms(grad_MI, active_M), lengths_E)
            case "snip":
                assert output_grad_MH is not None
                self._batch["down_proj"] = self._snip("down_proj", a_MI, output_grad_MH, lengths_E)

    def _add_terms(self, terms_MI: Tensor, lengths_E: Tensor) -> None:
        # in float64, because terms are squares of small gradients
        terms_MI = terms_MI.double()
        self._batch["down_proj"] = segment_sums(terms_MI, lengths_E)
        self._batch["squares_EI"] = segment_sums(terms_MI.square(), lengths_E)

    def _on_output_moments(self, routing: Routing, active_M: Tensor, grad_MH: Tensor) -> None:
        """Add the second moments of the gradients at the outputs of active experts.

        The gradients of a token's experts are one vector times their routing weights, so one row per token is enough:
        that of its largest weight.
        """
        output_HH = self.sums["output_HH"]
        weights_M = routing.routing_weights_M.to(output_HH.dtype).masked_fill(~active_M, 0)
        weights_KT = routing.by_slot(weights_M)
        largest_T, slot_T = weights_KT.abs().max(0)
        rows_KT = routing.order_M.view_as(weights_KT)
        norm_T = torch.linalg.vector_norm(weights_KT, dim=0)
        grad_TH = grad_MH[rows_KT.gather(0, slot_T[None])[0]].to(output_HH.dtype) * (norm_T / largest_T)[:, None]
        # not by a factor of zero, which leaves an infinite gradient NaN
        grad_TH.masked_fill_((largest_T == 0)[:, None], 0)
        # gradients in 16 bits were rounded more than TF32 rounds them
        with tf32_products(grad_MH.dtype in SIXTEEN_BITS):
            output_HH.addmm_(grad_TH.T, grad_TH)

    def _on_projection_grad(
        self, name: str, lengths_E: Tensor, active_M: Tensor, x_MH: Tensor, value_MI: Tensor, grad_MI: Tensor
    ) -> None:
        match self.metric:
            case "activation_gradient":
                self._batch[name] = segment_sums(activation_gradient_terms(products(value_MI, grad_MI)), lengths_E)
            case "gradient":
                self._batch[name] = segment_sums(gradient_terms(grad_MI, active_M), lengths_E)
            case "snip":
                self._batch[name] = self._snip(name, x_MH, grad_MI, lengths_E)

    def _bias_part(self, output_grad_MH: Tensor, lengths_E: Tensor) -> Tensor:
        """``<dNLL/dz, bias>`` of every row."""
        parts = []
        for mlp, grad_MH in zip(self.layer.mlps, output_grad_MH.split(lengths_E.tolist()), strict=True):
            with align_module_device(linear := projections(mlp)["down_proj"]):
                parts.append(grad_MH.double() @ linear.bias.detach().double())
        return torch.cat(parts)

    def _snip(self, name: str, input_MA: Tensor, grad_MO: Tensor, lengths_E: Tensor) -> Tensor:
        scores = []
        rows = zip(self.layer.mlps, input_MA.split(lengths_E.tolist()), grad_MO.split(lengths_E.tolist()), strict=True)
        for mlp, input_MA, grad_MO in rows:
            with align_module_device(linear := projections(mlp)[name]):
                scores.append(snip_scores(linear.weight, input_MA, grad_MO, channel_dim=int(name == "down_proj")))
        return torch.stack(scores)

    def end_batch(self, predicted: bool) -> None:
        """Add the sums of the batch.

        Args:
            predicted: whether any token of the batch is predicted, so that there are gradients.
        """
        assert not predicted or "nll" in self._batch, f"no gradient of the loss arrived at {self.layer.name}"
        for name, sums in self._batch.items():
            self._place(name).add_(sums)
        self._batch = {}

    def _place(self, name: str) -> Tensor:
        """The running sums of what a batch calls ``name``."""
        if name in self._projections:
            return self.sums["gradient_UEI"][self._projections.index(name)]
        return self.sums["nll_3E" if name == "nll" else name]

    def channel_scores(self, sums: Mapping[str, Tensor]) -> Tensor:
        """Final channel scores ``[E, I]``, float64 on the CPU, from the sums of all ranks; ``obs`` needs more."""
        return finalize_gradient_scores(self.metric, sums["gradient_UEI"])
