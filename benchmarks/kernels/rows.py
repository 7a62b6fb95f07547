"""Measured rows, and the file of JSON lines that keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One shape, number of bits and number of tokens.

    Attributes:
        shape, hidden, channels, experts, top_k: of the unpruned layer.
        group_size: input channels per scale, ``None`` for 16 bit.
        width: mean of ours, and that of all experts of the uniform layer.
        calls: inputs in a graph; ``copies``: of the weights, taken in turn.
        ours_us, stock_us: median microseconds of a call; of stock the fastest, ``None`` where it failed.
        ratio: ours over stock.
        stock_times: the same by stock's choice of tiles.
        stock_error: stock's own words.
        difference: Frobenius norm of ours minus stock over that of stock, on one uniform layer, 64 tokens.
        weight_bytes: of the experts that get a token, mean over calls of ours.
        terabytes_per_second: ``weight_bytes`` over ``ours_us``.
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
    def key(self) -> tuple[str, str, int, int]:
        """Of rows with equal keys the last one counts."""
        return self.card, self.shape, self.bits, self.tokens


def read_rows(files: Sequence[Path]) -> list[Row]:
    """Rows of files of JSON lines, the last one of each key."""
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [Row(**json.loads(line)) for line in lines]
    return list({row.key: row for row in rows}.values())


def append_row(path: Path, row: Row) -> None:
    """Add a row as one line, on the disk before the next one is measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")
