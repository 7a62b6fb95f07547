"""Keeps routers away from removed experts, and from a mask of other tokens than those that they route."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.serving import compat

PROBE_TOKENS = 64
# higher than any other logit of the probe: a router that ignores the mask selects removed experts first
PROBE_LOGIT = 20.0


def mask_router(router: Any, removed: Sequence[int], num_experts: int, device: torch.device) -> None:
    """Replace ``router.select_experts`` by one that sees ``-inf`` as the logits of removed experts.

    The mask is on the logits and not in the linear layer that computes them: most models build that layer without a
    quantization configuration, and its fused kernels on GPUs call no method. Top-k after softmax selects a logit of
    ``-inf`` only if nothing else is left. After sigmoid the score is 0, and the correction bias that such routers add
    is ``-inf`` in the checkpoint.

    Args:
        router: vLLM's router of one MoE layer.
        removed: experts that must never be selected.
        num_experts: columns of the router logits.
        device: where the logits are.

    Raises:
        CoverageError: the method of this router cannot be replaced.
    """
    removed_E = torch.zeros(num_experts, dtype=torch.bool, device=device)
    removed_E[list(removed)] = True
    select_experts = router.select_experts

    def select_kept_experts(
        hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return select_experts(hidden_states, router_logits.masked_fill(removed_E, -torch.inf), *args, **kwargs)

    # patch: router-mask
    if not _replace_method(router, select_kept_experts):
        raise CoverageError(
            f"{type(router).__name__} of this vLLM does not let its method select_experts be replaced, which keeps "
            "tokens from removed experts: serve with another release of vLLM, or prune again with layout='padded', "
            "which removes none"
        )


def route_gathered_tokens(router: Any) -> None:
    """Replace ``router.select_experts`` by one that routes the tokens of all ranks without a mask of one rank's.

    Padded tokens are computed then. They cost time and change no output.

    Args:
        router: vLLM's router of one MoE layer.

    Raises:
        CoverageError: the method of this router cannot be replaced.
    """
    select_experts = router.select_experts

    def select_for_all_ranks(
        hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with compat.without_short_padding_mask(len(hidden_states)):
            return select_experts(hidden_states, router_logits, *args, **kwargs)

    # patch: padding-of-one-rank
    if not _replace_method(router, select_for_all_ranks) or router.select_experts is not select_for_all_ranks:
        raise CoverageError(
            f"{type(router).__name__} of this vLLM does not let its method select_experts be replaced, without which "
            "tokens of data-parallel ranks are masked wrongly: serve with --tensor-parallel-size, or with another "
            "release of vLLM"
        )


def _replace_method(router: Any, method: Callable[..., Any]) -> bool:
    try:
        router.select_experts = method
    except AttributeError:
        return False
    return True


@torch.no_grad()
def check_mask(
    router: Any,
    removed: Sequence[int],
    num_experts: int,
    hidden_size: int,
    device: torch.device,
    dtype: torch.dtype,
    logits_dtype: torch.dtype,
) -> None:
    """Route random tokens once, as a layer does, and make sure that no removed expert is selected.

    The logits of removed experts are the highest ones, so a router that does not use the mask selects them. Call this
    after weights are loaded and before CUDA graphs are captured. Nothing is compiled.

    Args:
        router: vLLM's router of one MoE layer, after :func:`mask_router`.
        removed: experts that must never be selected.
        num_experts: columns of the router logits.
        hidden_size: columns of the hidden states.
        device: where hidden states and logits are.
        dtype: dtype of the hidden states.
        logits_dtype: dtype of the logits.

    Raises:
        CoverageError: a removed expert was selected.
    """
    # a generator of its own: the engine's random numbers do not depend on this check
    generator = torch.Generator().manual_seed(0)
    hidden_TH = torch.randn(PROBE_TOKENS, hidden_size, generator=generator).to(device, dtype)
    logits_TE = torch.randn(PROBE_TOKENS, num_experts, generator=generator)
    logits_TE[:, list(removed)] = PROBE_LOGIT
    logits_TE = logits_TE.to(device, logits_dtype)
    # some routers compile themselves, for shapes that the engine may not use
    with torch.compiler.set_stance("force_eager"):
        _, ids_TK = router.select_experts(hidden_states=hidden_TH, router_logits=logits_TE)
    selected = sorted(set(ids_TK.flatten().tolist()) & set(removed))
    if selected:
        raise CoverageError(
            f"{type(router).__name__} of this vLLM selects {len(selected)} of {len(removed)} removed experts, first "
            f"{selected[0]}, although their logits are masked: serve with another release of vLLM, or prune "
            "again with layout='padded', which removes none"
        )
