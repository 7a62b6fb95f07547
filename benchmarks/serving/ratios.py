"""Ratios of figures of our variants to those of stock variants."""

from __future__ import annotations

from typing import Any

PAIRS = (("ours4", "stock4"), ("ours4", "stock16"), ("ours8", "stock8"), ("ours16", "stock16"))

Figures = dict[str, Any]


def ratios(variants: dict[str, Figures]) -> dict[str, dict[str, float]]:
    """Return the ratios of every measured pair, for example ``{"ours4 / stock4": {"weights bytes": 0.75}}``.

    Args:
        variants: figures of each variant from ``Bench.measure``, or ``{"error": message}``.
    """
    found = {name: comparable(figures) for name, figures in variants.items() if "error" not in figures}
    return {
        f"{ours} / {stock}": {kind: value / found[stock][kind] for kind, value in found[ours].items()}
        for ours, stock in PAIRS
        if ours in found and stock in found
    }


def comparable(figures: Figures) -> dict[str, float]:
    """Return the figures of a variant of which ratios are computed, by name."""
    weights = figures["loading_bytes"] or figures["parameter_bytes"]
    decode = {f"decode tokens/s, batch {row['batch']}": row["tokens_per_second"] for row in figures["decode"]}
    prefill = figures["prefill"]
    seconds = {f"prefill seconds, {prefill['tokens']} tokens": prefill["median_seconds"]}
    return {"weights bytes": weights} | decode | seconds


def imbalance(figures: Figures) -> float:
    """Return the largest number of bytes of experts on a rank, relative to the mean over ranks, minus 1."""
    held = figures["expert_bytes_by_rank"]
    return max(held) * len(held) / sum(held) - 1


def table(variants: dict[str, Figures]) -> str:
    """Format the ratios, with a line for each figure and a column for each pair, and the errors of failed variants."""
    columns = ratios(variants)
    lines = []
    if columns:
        kinds = list(next(iter(columns.values())))
        left = max(len(kind) for kind in kinds)
        lines.append("  ".join([" " * left, *columns]))
        for kind in kinds:
            lines.append("  ".join([kind.ljust(left), *(f"{c[kind]:.3f}".rjust(len(n)) for n, c in columns.items())]))
    lines += [f"{name}: {figures['error']}" for name, figures in variants.items() if "error" in figures]
    return "\n".join(lines)
