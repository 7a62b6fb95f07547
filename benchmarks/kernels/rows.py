"""Measured rows, and the file of JSON lines in which they are stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One measurement: a shape, a number of bits and a number of tokens. "Stock" is vLLM's layer.

    Attributes:
        shape: name of the shape.
        hidden: hidden size.
        channels: channels of an expert of the unpruned layer.
        experts: number of experts.
        top_k: experts per token.
        bits: bits of a weight.
        group_size: input features per scale, ``None`` without quantization groups.
        tokens: tokens per call.
        width: mean width of our experts, and the width of all stock experts.
        calls: calls in a CUDA graph, each with its own inputs.
        copies: copies of the weights, used in turn.
        ours_us: median time of our call in microseconds.
        stock_us: the same of the fastest stock layer, ``None`` if all failed.
        ratio: ``ours_us / stock_us``.
        stock_times: median times of all stock layers by their names.
        stock_error: messages of stock layers that failed.
        difference: Frobenius norm of ours minus stock, relative to that of stock, on one uniform layer, 64 tokens.
        weight_bytes: bytes of weights that a call of ours reads, the mean over calls.
        terabytes_per_second: ``weight_bytes`` per ``ours_us``.
        card: name of the GPU.
        versions: of the packages that compute, by name.
        command: the command that measured the row.
        seed: of widths, weights and inputs.
    """

    shape: str
    hidden: int
    channels: int
    experts: int
    top_k: int
    bits: int
    group_size: int | None
    tokens: int
    width: int
    calls: int
    copies: int
    ours_us: float
    stock_us: float | None
    ratio: float | None
    stock_times: dict[str, float]
    stock_error: str | None
    difference: float | None
    weight_bytes: float
    terabytes_per_second: float
    card: str
    versions: dict[str, str]
    command: str
    seed: int

    @property
    def stack(self) -> tuple[str, str]:
        """The card, and the versions of the packages that compute."""
        return self.card, ", ".join(f"{name} {version}" for name, version in self.versions.items())

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """The setting of a row; of several rows with the same one, the last is used."""
        return *self.stack, self.shape, self.bits, self.tokens


def read_rows(files: Sequence[Path]) -> list[Row]:
    """Read files of JSON lines, the last row of each key."""
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [Row(**json.loads(line)) for line in lines]
    return list({row.key: row for row in rows}.values())


def append_row(path: Path, row: Row) -> None:
    """Append a row as one line and close the file, so that an interrupted benchmark loses nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")
