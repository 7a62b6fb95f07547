"""Draws the README's picture of loss over bytes from rows measured by `benchmarks.allocation`.

python -m benchmarks.pareto
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from moe_coverage_plugin.report.pareto import read_results, write_pareto

RESULTS = Path(__file__).with_name("results") / "recommended_qwen3_moe_85m.jsonl"
PICTURE = Path(__file__).with_name("pareto.png")
TABLE = "sweep"
METHODS = ("unpruned", "recommended", "paper", "REAP", "uniform width")
BITS = (16, 4)
# at higher sparsities, the loss of all methods is too large for the scale of the picture
MAX_SPARSITY = 0.5


def main() -> None:
    rows = map(json.loads, RESULTS.read_text(encoding="utf-8").splitlines())
    shown = [
        json.dumps(row)
        for row in rows
        if row["table"] == TABLE
        and row["method"] in METHODS
        and row["bits"] in BITS
        and row["sparsity"] <= MAX_SPARSITY
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / RESULTS.name
        file.write_text("\n".join(shown), encoding="utf-8")
        write_pareto(read_results(file), PICTURE)


if __name__ == "__main__":
    main()
