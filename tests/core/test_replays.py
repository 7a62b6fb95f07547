"""Functions that are called again, by a CUDA graph where there is a GPU."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from moe_coverage_plugin.core.replays import Replays

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("calls", [0, 1, 2, 3, 7])
def test_each_call_changes_the_tensors_once(device: str, calls: int):
    """Results that are read between calls are those of the calls so far."""
    total, ran = torch.ones(1000, device=device), []
    seen = []

    def double() -> None:
        ran.append(True)
        temporary = total * 2
        total.copy_(temporary)

    with Replays(double, total.device) as replays:
        for _ in range(calls):
            replays()
            seen.append(total.clone())
    assert [float(each.max()) for each in seen] == [2.0 ** (call + 1) for call in range(calls)]
    assert torch.equal(total, torch.full_like(total, 2.0**calls))
    assert len(ran) == (calls if device == "cpu" else min(calls, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_thread_loads_while_a_graph_is_captured():
    """As the next layer of an offloaded model is."""
    total, loaded = torch.zeros(10, device="cuda"), []

    def load() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            # larger than what the process has cached, so that memory is allocated
            loaded.append(torch.ones(2**28).to("cuda"))

    def add() -> None:
        thread = Thread(target=load)
        thread.start()
        total.add_(1)
        thread.join()

    with Replays(add, total.device) as replays:
        for _ in range(5):
            replays()
    assert torch.equal(total, torch.full_like(total, 5.0))
    assert [float(each.sum()) for each in loaded] == [2.0**28] * 2
