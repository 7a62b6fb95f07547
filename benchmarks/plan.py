"""Measures the time of a plan (coverage on both levels, then alignment), compared with the paper's search.

    python benchmarks/plan.py                 # the shape of Qwen3-30B-A3B, one line
    python benchmarks/plan.py --json          # the same as JSON

One thread, random scores, median of repeated runs. Run it in an environment in which the package is installed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.core.alignment import align_widths
from moe_coverage_plugin.core.allocation import channel_budget
from moe_coverage_plugin.core.planning import plan_widths
from moe_coverage_plugin.core.scores import AttributionScores
from moe_coverage_plugin.options import CoverageOptions


def binary_search_coverage(
    scores_GD: Tensor, prior_G: Tensor, budget: int, tolerance: float = 0.01, max_steps: int = 200
) -> Tensor:
    """Bisect ``alpha`` as the paper does, until the kept channels are within ``tolerance`` below the budget.

    This is the reference for :func:`moe_coverage_plugin.core.coverage.solve_coverage`. It evaluates
    ``N_g = min{n : S_g(n) >= min(alpha * phi_g, 1) * S_g(D)}`` for every ``alpha`` that it tries. With ``tolerance=0``
    it ends at the largest ``alpha`` within floating-point precision; if scores are equal, a part of the budget can be
    left.

    Args:
        scores_GD: ``[G, D]``, not negative; each group has a positive score.
        prior_G: ``[G]``, positive.
        budget: channels to keep.
        tolerance: fraction of the budget that need not be used.
        max_steps: largest number of bisection steps.

    Returns:
        Number of kept channels of each group ``[G]`` int64; their sum is at most ``budget``.
    """
    prefix_GD = scores_GD.double().sort(dim=-1, descending=True).values.cumsum(-1)
    total_G = prefix_GD[:, -1]
    prior_G = prior_G.double() / prior_G.double().max()

    def kept(alpha: float) -> Tensor:
        target_G = (alpha * prior_G).clamp(max=1) * total_G
        below_GD = prefix_GD < target_G[:, None]
        return (below_GD.sum(-1) + 1) * (target_G > 0)

    low, high = 0.0, float(1 / prior_G.min())
    if int(kept(high).sum()) <= budget:
        return kept(high)
    for _ in range(max_steps):
        if budget - int(kept(low).sum()) <= tolerance * budget or high - low <= 1e-16 * high:
            break
        middle = (low + high) / 2
        low, high = (middle, high) if int(kept(middle).sum()) <= budget else (low, middle)
    return kept(low)


def paper_plan(scores_LEI: Tensor, layer_prior_L: Tensor, expert_prior_LE: Tensor, budget: int) -> Tensor:
    """Allocate on both levels by the paper's search, with its tolerance of 1 %."""
    budgets_L = binary_search_coverage(scores_LEI.flatten(1), layer_prior_L, budget)
    layers = zip(scores_LEI, expert_prior_LE, budgets_L.tolist(), strict=True)
    return torch.stack([binary_search_coverage(scores, prior, share) for scores, prior, share in layers])


class Seconds(NamedTuple):
    """Medians over repeated runs of wall-clock time and CPU time."""

    wall: float
    cpu: float


def median_seconds(function: Callable[[], object], repeats: int) -> Seconds:
    runs = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        function()
        runs.append((time.perf_counter() - wall, time.process_time() - cpu))
    return Seconds(*map(statistics.median, zip(*runs, strict=True)))


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs=3, default=[48, 128, 768], metavar=("L", "E", "I"))
    parser.add_argument("--sparsity", type=float, default=0.25)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(options.seed)
    layers, experts, channels = options.shape
    # log-normal, because activation norms have heavy tails
    scores_LEI = torch.randn(layers, experts, channels, dtype=torch.float64, generator=generator).exp()
    layer_prior_L = torch.rand(layers, dtype=torch.float64, generator=generator) + 0.1
    expert_prior_LE = torch.rand(layers, experts, dtype=torch.float64, generator=generator) + 0.1
    budget = channel_budget(scores_LEI.numel(), options.sparsity)
    scores = AttributionScores(
        names=[f"layers.{layer}" for layer in range(layers)],
        top_k=[1] * layers,
        channel_metric="activation",
        channels_LEI=scores_LEI,
        first_order_LE=expert_prior_LE,
        second_order_LE=expert_prior_LE,
        tokens_LE=torch.ones(layers, experts, dtype=torch.int64),
        routing_weight_sum_LE=expert_prior_LE,
        layer_loss_L=layer_prior_L,
    )
    # without smoothing of the priors, so that the paper's search solves the same problem
    both_levels = CoverageOptions(
        sparsity=options.sparsity, scope="layers", inter_layer="coverage", intra_layer="coverage", smoothing="none"
    )

    def coverage() -> Tensor:
        return plan_widths(scores, both_levels).widths_LE

    def plan() -> Tensor:
        return align_widths(coverage(), scores_LEI, options.block_size, options.block_size, "l-r-c").widths_LE

    plan()  # warm-up
    complete = median_seconds(plan, options.repeats)
    search = median_seconds(lambda: paper_plan(scores_LEI, layer_prior_L, expert_prior_LE, budget), 3)
    ours = median_seconds(coverage, options.repeats)
    result = {
        "cpu": processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "seed": options.seed,
        "shape": options.shape,
        "sparsity": options.sparsity,
        "block_size": options.block_size,
        "repeats": options.repeats,
        "plan_seconds": complete.wall,
        "plan_cpu_seconds": complete.cpu,
        "coverage_cpu_seconds": ours.cpu,
        "paper_search_cpu_seconds": search.cpu,
        "ratio": search.cpu / ours.cpu,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"{result['cpu']}, torch {torch.__version__}, threads={torch.get_num_threads()}, seed={options.seed}: "
        f"{'x'.join(map(str, options.shape))} coverage (two levels) + alignment {complete.wall:.3f} s "
        f"(median of {options.repeats}; CPU time {complete.cpu:.3f} s); the paper's search at 1 % takes "
        f"{search.cpu / ours.cpu:.1f} times the CPU time of coverage ({search.cpu:.2f} s)"
    )


if __name__ == "__main__":
    main()
