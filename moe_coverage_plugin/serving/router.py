"""Keeps routers away from removed experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def mask_router(router: Any, removed: Sequence[int], num_experts: int, device: torch.device) -> None:
    """Have ``router.select_experts`` see ``-inf`` in place of the logits of removed experts.

    The logits and not the linear layer that makes them: most models build that layer without a quantization
    configuration, and its fused kernels on GPUs ask no method. Top-k after softmax never prefers a logit of ``-inf``.
    After sigmoid the score is 0, and the correction bias that such routers add is ``-inf`` in the checkpoint.

    Args:
        router: vLLM's router of one mixture layer.
        removed: experts that must never be chosen.
        num_experts: columns of the router logits.
        device: where the logits are.
    """
    removed_E = torch.zeros(num_experts, dtype=torch.bool, device=device)
    removed_E[list(removed)] = True
    select_experts = router.select_experts

    def select_living_experts(
        hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return select_experts(hidden_states, router_logits.masked_fill(removed_E, -torch.inf), *args, **kwargs)

    router.select_experts = select_living_experts
