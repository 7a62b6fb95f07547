"""Assigns each expert to one rank of expert parallelism, so that ranks hold equal memory and get equal work.

Engines give ranks equal numbers of experts. Experts of unequal width then take unequal memory, and ranks wait for each
other in every layer. Two measures are balanced here: memory over all layers together, which decides how much is left
on the fullest rank, and expected work in each layer, which takes as long as its busiest rank.

All numbers are integers, so that every rank of an engine and ``moe-coverage inspect`` compute the same placement.
Standard library only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_coverage_plugin.manifest import Manifest

NEIGHBORS = 4
"""Experts on either side of the best size that are tried in an exchange: others may be too much work."""

MOST_EXCHANGES = 1_000
"""Bound on the exchanges in one layer; a few are usual."""


@dataclass(frozen=True)
class LayerLoads:
    """Loads of the experts of one layer, in units that are the same in all layers.

    Attributes:
        size_E: memory of each expert.
        work_E: expected work of each expert.
    """

    size_E: tuple[int, ...]
    work_E: tuple[int, ...]


def layer_loads(manifest: Manifest, bits: Mapping[str, int]) -> dict[str, LayerLoads]:
    """Return the loads of the layers of a checkpoint that are placed, in the order of the model.

    Memory is width times bits. Work is width times routed calibration tokens; width alone in layers for which the
    checkpoint has no counts.

    Args:
        manifest: of the checkpoint.
        bits: bits of a weight of the experts, by layer; layers that are not in it are left out.
    """
    loads = {}
    for name, widths_E in manifest.widths.items():
        if name in bits:
            tokens_E = manifest.tokens.get(name) or [1] * len(widths_E)
            work_E = (width * tokens for width, tokens in zip(widths_E, tokens_E, strict=True))
            loads[name] = LayerLoads(tuple(width * bits[name] for width in widths_E), tuple(work_E))
    return loads


def place_experts(layers: Sequence[LayerLoads], ranks: int) -> list[list[int]]:
    """Return the rank that holds each expert, for each layer.

    In each layer, experts are assigned in the order of decreasing work to the rank with the least work so far (LPT,
    Graham 1969), and then moved or exchanged while the busiest rank gets less work. The groups of experts go to ranks
    in such an order that a rank with much memory in earlier layers gets little. Experts are then exchanged while
    memory is balanced better and no rank gets more work than the busiest one.

    Compared to :func:`contiguous`, the busiest rank of a layer gets no more work, and the fullest rank holds no more
    memory.

    Args:
        layers: in the order of the model, so that the stages of a pipeline are balanced, too.
        ranks: number of ranks.
    """
    by_engine = [contiguous(len(layer.size_E), ranks) for layer in layers]
    placement, held_R = [], [0] * ranks
    for layer, engine_E in zip(layers, by_engine, strict=True):
        candidates = _longest_first(layer.work_E, ranks), list(engine_E)
        for holders_E in candidates:
            _even_out(layer.work_E, holders_E, [0] * ranks)
        holders_E = min(candidates, key=lambda each: max(sums(layer.work_E, each, ranks)))
        _relabel(layer.size_E, holders_E, held_R)
        _even_out(layer.size_E, holders_E, held_R, layer.work_E, max(sums(layer.work_E, holders_E, ranks)))
        held_R = _added(held_R, sums(layer.size_E, holders_E, ranks))
        placement.append(holders_E)
    own_limits, engine_limits = (
        [max(sums(layer.work_E, each, ranks)) for layer, each in zip(layers, placed, strict=True)]
        for placed in (placement, by_engine)
    )
    most = max(total_sizes(layers, by_engine, ranks))
    # by luck, an engine's placement may balance memory better than the work of a layer allows
    for placed, limits in ((placement, own_limits), (placement, engine_limits), (by_engine, engine_limits)):
        _even_out_all(layers, placed, ranks, limits)
        if max(total_sizes(layers, placed, ranks)) <= most:
            return placed
    raise AssertionError("exchanges never give the fullest rank more memory")


def contiguous(experts: int, ranks: int) -> list[int]:
    """Return the rank of each expert of a layer as vLLM assigns them by default: equal numbers in their order."""
    each, more = divmod(experts, ranks)
    return [rank for rank in range(ranks) for _ in range(each + (rank < more))]


def size_ratio(layers: Sequence[LayerLoads], placement: Sequence[Sequence[int]], ranks: int) -> float:
    """Return the memory of the fullest rank over all layers, divided by that of the mean rank."""
    sizes_R = total_sizes(layers, placement, ranks)
    return max(sizes_R) * ranks / sum(sizes_R) if any(sizes_R) else 1.0


def work_ratio(layers: Sequence[LayerLoads], placement: Sequence[Sequence[int]], ranks: int) -> float:
    """Return the work of the busiest rank in each layer, summed over layers, divided by that of the mean rank."""
    busiest = sum(max(sums(layer.work_E, each, ranks)) for layer, each in zip(layers, placement, strict=True))
    total = sum(sum(layer.work_E) for layer in layers)
    return busiest * ranks / total if total else 1.0


def total_sizes(layers: Sequence[LayerLoads], placement: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Return the memory of every rank over all layers."""
    total_R = [0] * ranks
    for layer, holders_E in zip(layers, placement, strict=True):
        total_R = _added(total_R, sums(layer.size_E, holders_E, ranks))
    return total_R


def sums(load_E: Sequence[int], holders_E: Sequence[int], ranks: int) -> list[int]:
    """Return the load of every rank in one layer."""
    sums_R = [0] * ranks
    for load, rank in zip(load_E, holders_E, strict=True):
        sums_R[rank] += load
    return sums_R


def _added(first_R: Sequence[int], second_R: Sequence[int], sign: int = 1) -> list[int]:
    return [first + sign * second for first, second in zip(first_R, second_R, strict=True)]


def _longest_first(work_E: Sequence[int], ranks: int) -> list[int]:
    holders_E, busy_R, count_R = [0] * len(work_E), [0] * ranks, [0] * ranks
    for expert in sorted(range(len(work_E)), key=lambda expert: (-work_E[expert], expert)):
        # experts without work are spread by their number
        rank = min(range(ranks), key=lambda rank: (busy_R[rank], count_R[rank], rank))
        holders_E[expert] = rank
        busy_R[rank] += work_E[expert]
        count_R[rank] += 1
    return holders_E


def _relabel(size_E: Sequence[int], holders_E: list[int], held_R: Sequence[int]) -> None:
    """Give the largest group of experts to the rank that holds the least, and so on."""
    ranks = len(held_R)
    size_R = sums(size_E, holders_E, ranks)
    largest_first = sorted(range(ranks), key=lambda rank: (-size_R[rank], rank))
    emptiest_first = sorted(range(ranks), key=lambda rank: (held_R[rank], rank))
    label_R = dict(zip(largest_first, emptiest_first, strict=True))
    holders_E[:] = [label_R[rank] for rank in holders_E]


def _even_out_all(
    layers: Sequence[LayerLoads], placement: Sequence[list[int]], ranks: int, limits: Sequence[int]
) -> None:
    """Exchange experts within layers while the fullest rank over all layers gets less memory."""
    total_R = total_sizes(layers, placement, ranks)
    for layer, holders_E, most_work in zip(layers, placement, limits, strict=True):
        others_R = _added(total_R, sums(layer.size_E, holders_E, ranks), -1)
        _even_out(layer.size_E, holders_E, others_R, layer.work_E, most_work)
        total_R = _added(others_R, sums(layer.size_E, holders_E, ranks))


def _even_out(
    load_E: Sequence[int],
    holders_E: list[int],
    held_R: Sequence[int],
    work_E: Sequence[int] | None = None,
    most_work: int = 0,
) -> None:
    """Move and exchange experts of one layer, in place, while the rank with the most load gets less.

    Args:
        load_E: to be balanced.
        holders_E: rank of each expert, changed in place.
        held_R: load that every rank has from elsewhere.
        work_E: work of each expert, if it is limited.
        most_work: work that no rank may exceed.
    """
    ranks = len(held_R)
    groups = [[e for e, holder in enumerate(holders_E) if holder == rank] for rank in range(ranks)]
    total_R = _added(held_R, sums(load_E, holders_E, ranks))
    work_E = work_E or [0] * len(load_E)
    busy_R = sums(work_E, holders_E, ranks)
    for _ in range(MOST_EXCHANGES):
        fullest = max(range(ranks), key=lambda rank: (total_R[rank], -rank))
        for rank in sorted(range(ranks), key=lambda rank: (total_R[rank], rank)):
            room = most_work - busy_R[fullest], most_work - busy_R[rank]
            gap = total_R[fullest] - total_R[rank]
            found = _best_exchange(load_E, work_E, groups[fullest], groups[rank], gap, room)
            if found is not None:
                break
        else:
            return
        for source, target, expert in ((fullest, rank, found[0]), (rank, fullest, found[1])):
            if expert is None:
                continue
            holders_E[expert] = target
            groups[source].remove(expert)
            groups[target].append(expert)
            for loads_R, of_E in ((total_R, load_E), (busy_R, work_E)):
                loads_R[source] -= of_E[expert]
                loads_R[target] += of_E[expert]


def _best_exchange(
    load_E: Sequence[int],
    work_E: Sequence[int],
    full: Sequence[int],
    empty: Sequence[int],
    gap: int,
    room: tuple[int, int],
) -> tuple[int, int | None] | None:
    """Return an expert of the fuller group and one for it, or ``None`` to move it, that best halve the gap.

    ``room`` is the work that either rank may still get.
    """
    if gap <= 0:
        return None
    others = sorted([(load_E[e], e) for e in empty])
    best: tuple[int, int, int | None] | None = None
    for expert in full:
        # the gap becomes gap - 2 * moved
        wanted = bisect_left(others, (load_E[expert] - gap // 2, -1))
        nearest = others[max(0, wanted - NEIGHBORS) : wanted + NEIGHBORS]
        for load, other in (*nearest, (0, None)):
            moved = load_E[expert] - load
            more_work = work_E[expert] - (0 if other is None else work_E[other])
            if 0 < moved < gap and -room[0] <= more_work <= room[1]:
                left = abs(gap - 2 * moved)
                if best is None or left < best[0]:
                    best = left, expert, other
    return best and best[1:]
