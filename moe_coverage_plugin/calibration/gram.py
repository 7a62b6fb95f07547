"""Gram matrices of the channels of experts, from which ``down_proj`` is reconstructed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_coverage_plugin.calibration.distributed import sum_over_ranks
from moe_coverage_plugin.calibration.layer_inputs import LayerInputs
from moe_coverage_plugin.calibration.observer import non_finite_activations
from moe_coverage_plugin.core.reconstruction import gram
from moe_coverage_plugin.modeling.grouped_experts import activations
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_width

# experts whose activations are computed together where a call for each would wait for the host
TOGETHER = 8


@torch.no_grad()
def channel_grams(layer: MoELayer, experts: Sequence[int], inputs: LayerInputs) -> Tensor:
    """Gram matrices ``sum_t g_t^2 A_t A_t^T`` over tokens of some experts; collective.

    Args:
        layer: the layer.
        experts: their indices; all of one width, none of them removed.
        inputs: of the layer; :meth:`~moe_coverage_plugin.calibration.layer_inputs.LayerInputs.tokens` are summed.

    Returns:
        ``[2, D, I, I]`` for the ``D`` experts, float32 or wider on their device, summed over all ranks: of the tokens
        that a fit may use, and of those held back to test it.

    Raises:
        CoverageError: activations that are NaN or infinite.
    """
    channels = expert_width(layer.mlps[experts[0]])
    dtype = torch.promote_types(inputs.x_TH.dtype, torch.float32)
    grams_2DII = torch.empty(2, len(experts), channels, channels, dtype=dtype, device=inputs.device)
    together = min(TOGETHER, inputs.experts_together)
    for start in range(0, len(experts), together):
        some = experts[start : start + together]
        tokens = [inputs.tokens(expert) for expert in some]
        found = activations(layer, some, [each.x_MH for each in tokens])
        for position, (each, a_MI) in enumerate(zip(tokens, found, strict=True), start):
            for part, values in enumerate(each._replace(x_MH=a_MI).sides()):
                grams_2DII[part, position] = gram(*values)
    if torch.distributed.is_initialized():
        grams_2DII = sum_over_ranks({"grams_2DII": grams_2DII.cpu()})["grams_2DII"].to(grams_2DII.device)
    # every entry of a row is finite if its diagonal is: |G_ij|^2 <= G_ii G_jj
    finite_D = torch.isfinite(grams_2DII.diagonal(dim1=-2, dim2=-1)).all(-1).all(0)
    if not bool(finite_D.all()):
        expert = experts[int((~finite_D).nonzero()[0])]
        raise non_finite_activations(f"{layer.name} expert {expert}")
    return grams_2DII
