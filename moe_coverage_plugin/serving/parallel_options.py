"""Checks the options of parallelism for experts of unequal width, in the user's process, before memory is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.serving import compat

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

GATHERING_BACKEND = "allgather_reducescatter"
"""vLLM's default backend for data-parallel ranks, which sends all tokens to all ranks and sums their outputs."""

ENGINE_PLACEMENT = "linear"
"""vLLM's default placement of experts, which ours replaces."""


def check_parallel(parallel: ParallelConfig) -> None:
    """Check a complete configuration.

    Raises:
        CoverageError: an option cannot work, or would silently have no effect.
    """
    check_balancing(parallel.enable_eplb)
    if parallel.enable_expert_parallel:
        check_expert_parallel(
            parallel.expert_placement_strategy,
            compat.filters_experts_by_number(parallel),
            compat.context_parallel_ranks(parallel),
        )
    if parallel.data_parallel_size > 1:
        check_data_parallel(parallel.data_parallel_size, parallel.all2all_backend)


def check_balancing(enabled: bool) -> None:
    """Check that experts stay on their ranks.

    Args:
        enabled: ``enable_eplb``.

    Raises:
        CoverageError: vLLM would exchange experts between ranks, for which it needs equal sizes.
    """
    if enabled:
        raise CoverageError(
            "enable_eplb is set, but experts of unequal width cannot move between ranks of a running engine: serve "
            "without --enable-eplb; --enable-expert-parallel alone balances ranks by widths and calibration tokens"
        )


def check_stock_experts(expert_parallel: bool, ranks: int) -> None:
    """Check expert parallelism for experts of one width that vLLM computes by its own kernels.

    Args:
        expert_parallel: ``enable_expert_parallel``, which vLLM ignores on one rank.
        ranks: number of ranks among which it would divide experts.

    Raises:
        CoverageError: the kernels of this build cannot.
    """
    if expert_parallel and ranks > 1 and compat.lacks_expert_parallel_moe():
        raise CoverageError(
            "enable_expert_parallel is set, but the kernels of this build of vLLM for experts of one width read "
            "experts of other ranks and end the process (all models of this kind, pruned or not): serve without "
            "--enable-expert-parallel, or on a GPU"
        )


def check_expert_parallel(strategy: str, filters_by_number: bool, context_ranks: int) -> None:
    """Check the options that go with ``enable_expert_parallel``.

    Args:
        strategy: ``expert_placement_strategy``.
        filters_by_number: ``enable_ep_weight_filter``.
        context_ranks: ``prefill_context_parallel_size``.

    Raises:
        CoverageError: they choose experts by their number, or ranks would get other tokens than their experts need.
    """
    if strategy != ENGINE_PLACEMENT:
        raise CoverageError(
            f"expert_placement_strategy is {strategy!r}, but experts of unequal width are placed by their widths and "
            "calibration tokens: serve without --expert-placement-strategy"
        )
    if filters_by_number:
        raise CoverageError(
            "enable_ep_weight_filter is set, which chooses the experts to read by their numbers, but experts of "
            "unequal width are placed by their widths: serve without --enable-ep-weight-filter, tensors of experts on "
            "other ranks are mapped into memory but not copied"
        )
    if context_ranks > 1:
        raise CoverageError(
            f"prefill_context_parallel_size is {context_ranks} with enable_expert_parallel, for which vLLM sends "
            "tokens to experts inside its own kernels, but experts of unequal width run in others: serve without one "
            "of the two options"
        )


def check_data_parallel(ranks: int, backend: str) -> None:
    """Check that the tokens of all data-parallel ranks reach every rank.

    Each rank computes the part of all outputs that its experts, or its parts of experts, contribute.

    Args:
        ranks: number of data-parallel ranks.
        backend: name of vLLM's all-to-all backend.

    Raises:
        CoverageError: the backend or this build of vLLM does not send all tokens to all ranks.
    """
    if backend != GATHERING_BACKEND:
        raise CoverageError(
            f"all2all_backend is {backend!r}, which sends tokens to the ranks where vLLM would place their experts, "
            "but experts of unequal width are placed otherwise and need the tokens of all ranks: serve without "
            "--all2all-backend"
        )
    if compat.lacks_data_parallel_moe():
        raise CoverageError(
            f"data_parallel_size is {ranks}, but this build of vLLM cannot gather the tokens of its ranks for experts "
            "(all_gatherv): serve with --tensor-parallel-size, or start independent engines"
        )
