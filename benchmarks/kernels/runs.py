"""Measures one row after the other."""

from __future__ import annotations

import gc
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.commands import portable
from benchmarks.kernels.layers import Call, Layer, draw, ours, random_tensors, stock
from benchmarks.kernels.rows import Row, append_row
from benchmarks.kernels.shapes import GROUP_SIZE, Shape, copies_needed, mean_bytes, random_widths
from benchmarks.kernels.timing import capture, medians_us

CALLS, CALLS_OF_MANY, MANY_TOKENS = 24, 4, 4096
"""Calls in a CUDA graph, and fewer from ``MANY_TOKENS`` on, when a call takes long and reads all weights."""

GUARD_TOKENS = 64
MAX_DIFFERENCE = {16: 1e-2, 8: 4e-2, 4: 2e-2}
ERROR_CHARACTERS = 300

T = TypeVar("T")


class Measurement:
    """Our layer and vLLM's ("stock") for one shape and number of bits."""

    def __init__(self, shape: Shape, bits: int, seed: int) -> None:
        self.shape, self.bits, self.seed = shape, bits, seed
        self.widths_E = random_widths(shape, seed)
        self.errors: list[str] = []
        generator = self._generator()
        self.ours = ours(random_tensors(self.widths_E, shape.hidden, bits, generator), self.widths_E, shape.hidden)
        tensors = random_tensors([shape.width] * shape.experts, shape.hidden, bits, generator)
        self.stock = self._attempt(lambda: stock(tensors, shape)) or {}
        # last, because our layer overwrites packed tensors
        self.difference = self._difference(ours(tensors, [shape.width] * shape.experts, shape.hidden))

    def row(self, tokens: int) -> Row:
        """Measure one row. A failure of stock is recorded in it, one of ours is raised."""
        shape = self.shape
        calls, copies = self._calls(tokens)
        weight_bytes = self._mean_bytes(calls)
        graph = capture(self.ours, calls, copies)
        errors = list(self.errors)
        graphs = {
            name: self._attempt(lambda layer=layer: capture(layer, calls, copies), errors)
            for name, layer in self.stock.items()
        }
        captured = {name: each for name, each in graphs.items() if each is not None}
        ours_us, *stock_us = medians_us([graph, *captured.values()], len(calls))
        fastest = min(stock_us, default=None)
        return Row(
            shape=shape.name,
            hidden=shape.hidden,
            channels=shape.channels,
            experts=shape.experts,
            top_k=shape.top_k,
            bits=self.bits,
            group_size=GROUP_SIZE if self.bits == 4 else None,
            tokens=tokens,
            width=shape.width,
            calls=len(calls),
            copies=copies,
            ours_us=ours_us,
            stock_us=fastest,
            ratio=ours_us / fastest if fastest is not None else None,
            stock_times=dict(zip(captured, stock_us, strict=True)),
            stock_error="; ".join(dict.fromkeys(errors)) or None,
            difference=self.difference,
            weight_bytes=weight_bytes,
            terabytes_per_second=weight_bytes / ours_us / 1e6,
            card=torch.cuda.get_device_name(),
            versions=versions(),
            command=portable("benchmarks.kernels", sys.argv[1:], {"--results"}),
            seed=self.seed,
        )

    def _generator(self) -> torch.Generator:
        return torch.Generator("cuda").manual_seed(self.seed)

    def _calls(self, tokens: int) -> tuple[list[Call], int]:
        """Calls with different inputs, and the number of copies of weights, which divides the number of calls."""
        generator = self._generator()
        count = CALLS if tokens < MANY_TOKENS else CALLS_OF_MANY
        calls = [draw(self.shape, tokens, generator) for _ in range(count)]
        copies = copies_needed(self._mean_bytes(calls), _cache_bytes())
        calls += [draw(self.shape, tokens, generator) for _ in range(-count % copies)]
        return calls, copies

    def _mean_bytes(self, calls: Sequence[Call]) -> float:
        hit = [call.topk_ids_TK.unique().tolist() for call in calls]
        return mean_bytes(hit, self.widths_E, self.shape.hidden, self.bits)

    def _difference(self, uniform: Layer) -> float | None:
        """Relative difference of ours from stock on the same uniform layer, ``None`` if stock fails."""
        call = draw(self.shape, GUARD_TOKENS, self._generator())
        y_TH = uniform.run(uniform.copies[0], call).float()
        assert y_TH.isfinite().all()
        for layer in self.stock.values():
            expected_TH = self._attempt(lambda layer=layer: layer.run(layer.copies[0], call).float())
            if expected_TH is not None:
                difference = float((y_TH - expected_TH).norm() / expected_TH.norm())
                assert difference < MAX_DIFFERENCE[self.bits], f"{self.shape.name}, {self.bits} bits: {difference}"
                return difference
        return None

    def _attempt(self, function: Callable[[], T], errors: list[str] | None = None) -> T | None:
        """Run ``function`` of stock; if it fails, keep its message and return ``None``."""
        try:
            result = function()
            torch.cuda.synchronize()
            return result
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
            (self.errors if errors is None else errors).append(message)
            return None


@torch.no_grad()
def run(shapes: Sequence[Shape], tokens: Sequence[int], bits: Sequence[int], seed: int, results: Path) -> None:
    """Measure all combinations, and append each row to ``results`` as soon as it is measured."""
    for shape in shapes:
        for each in bits:
            measurement = Measurement(shape, each, seed)
            for count in tokens:
                row = measurement.row(count)
                append_row(results, row)
                print(_line(row), flush=True)
            del measurement
            gc.collect()
            torch.cuda.empty_cache()


def _cache_bytes() -> int:
    """Size of the card's L2 cache."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def versions() -> dict[str, str]:
    """Versions of the packages that compute; vLLM's is ``none`` if it is not installed."""
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__}
    try:
        import vllm

        found["vllm"] = vllm.__version__
    except ImportError:
        found["vllm"] = "none"
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found | {project["name"]: project["version"]}


def _line(row: Row) -> str:
    stock_us = "failed" if row.stock_us is None else f"{row.stock_us:.1f} µs"
    ratio = "" if row.ratio is None else f", ratio {row.ratio:.3f}"
    return (
        f"{row.shape}, {row.bits} bits, {row.tokens} tokens: ours {row.ours_us:.1f} µs "
        f"({row.terabytes_per_second:.2f} TB/s), stock {stock_us}{ratio}"
        + (f"; {row.stock_error}" if row.stock_error else "")
    )
