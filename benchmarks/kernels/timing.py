"""Times calls of several layers alternately, in CUDA graphs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from benchmarks.kernels.layers import Call, Layer

WARM_REPLAYS, REPLAYS = 3, 21


def capture(layer: Layer, calls: Sequence[Call], copies: int) -> torch.cuda.CUDAGraph:
    """Capture all calls in one CUDA graph, so that launches from Python are not measured.

    Args:
        layer: the layer to call.
        calls: inputs of each call.
        copies: copies of the weights, which calls use in turn.

    Raises:
        FloatingPointError: if an output is not finite.
    """
    weights = layer.copied(copies)
    # kernels are compiled at their first call, which is not possible during capture
    outputs = [layer.run(weights[index % copies], call).isfinite().all() for index, call in enumerate(calls)]
    if not torch.stack(outputs).all():
        raise FloatingPointError("outputs are not finite")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index, call in enumerate(calls):
            layer.run(weights[index % copies], call)
    return graph


def medians_us(graphs: Sequence[torch.cuda.CUDAGraph], calls: int) -> list[float]:
    """Median time per call of each graph in microseconds.

    Graphs are replayed alternately, so that all are measured at the same clock rates.

    Args:
        graphs: from ``capture``.
        calls: calls in each graph.
    """
    spans = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPLAYS)] for _ in graphs]
    for _ in range(WARM_REPLAYS):
        for graph in graphs:
            graph.replay()
    for replay in range(REPLAYS):
        for graph, events in zip(graphs, spans, strict=True):
            start, stop = events[replay]
            start.record()
            graph.replay()
            stop.record()
    torch.cuda.synchronize()
    times = [[start.elapsed_time(stop) for start, stop in events] for events in spans]
    return [statistics.median(each) * 1e3 / calls for each in times]
