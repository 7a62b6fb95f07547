"""Repeats a sequence of small operations on a GPU without the host starting each of them again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache

import torch


class Replays:
    """Calls a function that changes tensors in place; on a GPU, its second call and all others replay a CUDA graph.

    A GPU would otherwise wait for the host, which takes longer to start small operations than they take. The function
    must not wait for the GPU, and what differs from call to call must be in the tensors that it changes.

    A context: the function runs on a stream of its own, which the current stream waits for at the end.
    """

    def __init__(self, function: Callable[[], None], device: torch.device):
        """Prepare nothing yet.

        Args:
            function: what is repeated.
            device: of all its tensors; on a CPU, the function is simply called.
        """
        self._function, self._device = function, device
        self._called = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Replays:
        if self._device.type == "cuda":
            stream = _stream(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            self._stack.callback(torch.cuda.current_stream(self._device).wait_stream, stream)
            # so that no memory of the graph is freed while it runs
            self._stack.callback(stream.synchronize)
            self._stack.enter_context(torch.cuda.stream(stream))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __call__(self) -> None:
        """Call the function, or replay what it did."""
        if self._device.type != "cuda" or not self._called:
            # libraries allocate their workspaces at the first call, which cannot be captured
            self._function()
            self._called = True
            return
        if self._graph is None:
            # not by the context torch.cuda.graph, which also returns all cached memory of the process
            self._graph = torch.cuda.CUDAGraph()
            # another thread may load the next layer meanwhile: its allocations would be errors in the global mode
            self._graph.capture_begin(capture_error_mode="thread_local")
            self._function()
            self._graph.capture_end()
        self._graph.replay()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # one for all graphs, because each stream caches memory of its own
    return torch.cuda.Stream(device)
