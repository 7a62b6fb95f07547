"""Microseconds of a layer's call, several layers in turn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from benchmarks.kernels.layers import Call, Layer

WARM_REPLAYS, REPLAYS = 3, 21


def capture(layer: Layer, calls: Sequence[Call], copies: int) -> torch.cuda.CUDAGraph:
    """All calls in one CUDA graph, each with the next copy of the weights: Python's launches are not measured.

    Raises:
        FloatingPointError: an output is not finite.
    """
    weights = layer.copied(copies)
    # what is compiled at the first call cannot be compiled while a graph is captured
    outputs = [layer.run(weights[index % copies], call).isfinite().all() for index, call in enumerate(calls)]
    if not torch.stack(outputs).all():
        raise FloatingPointError("outputs are not finite")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index, call in enumerate(calls):
            layer.run(weights[index % copies], call)
    return graph


def medians_us(graphs: Sequence[torch.cuda.CUDAGraph], calls: int) -> list[float]:
    """Median time of a call in every graph; they are replayed in turn, so that clocks are alike."""
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
