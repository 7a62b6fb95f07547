"""Writes the section of RESULTS.md about long mixed loads from measured files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.markers import markers, write_sections
from benchmarks.serving.render import machine
from benchmarks.soak.figures import Figures
from benchmarks.soak.traffic import ABORTED, KINDS, LOGPROBS, PREFIXES, PROMPT_LOGPROBS, SEVERAL, WITH_PREFIX

NAME = "soak"
BEGIN, END = markers(NAME)
INTRODUCTION = f"""## A mixed load for minutes

Written by `python -m benchmarks.soak --render`. Variants are those of the section before, each in its own engine.

{BEGIN}
{END}
"""
MIB = 2**20


def write_results(files: Sequence[Path], path: Path) -> None:
    """Write the tables of the files' runs between the markers of ``path``.

    Raises:
        CoverageError: if the page has no markers.
    """
    write_sections(path, NAME, INTRODUCTION, files, section)


def section(record: dict[str, Any]) -> str:
    """Settings, and the figures of every checkpoint, as Markdown."""
    from tabulate import tabulate  # pyright: ignore[reportMissingModuleSource]  # not in vLLM's environment

    request, shape = record["request"], record["shape"]
    measured = {name: figures for name, figures in record["checkpoints"].items() if "error" not in figures}
    head = [
        *machine(record),
        *([f"Shape: {shape['num_hidden_layers']} layers of {shape['num_experts']} experts."] if shape else []),
        f"Load: {request['at_once']} requests at any moment for {request['minutes']:g} minutes. "
        f"Of {sum(KINDS.values())}, {', '.join(f'{count} {kind}' for kind, count in KINDS.items())}: `several` gets "
        f"{SEVERAL} answers, `logprobs` the {LOGPROBS} most likely tokens of each position and {PROMPT_LOGPROBS} of "
        f"the prompt's, `long` a prompt of at least half of {request['max_model_len']} tokens; {WITH_PREFIX:.0%} of "
        f"prompts begin with one of {PREFIXES} prefixes, and {ABORTED:.0%} of requests are aborted unless they finish "
        "before.",
        "Memory: what all processes use on the card, and resident memory without files of the engine's processes; "
        f"from minute {request['warm_up_minutes']:g} on, by the line with the least squared errors.",
        "Answers: log-probabilities of tokens that a greedy or long request got under load, minus those that a single "
        "request gets for the same tokens as a part of its prompt; and the tokens of the prompt sent alone, up to the "
        "first difference. The batches differ, so sums are in another order, and tokens that are about as likely may "
        f"be exchanged. Bound of an answer's median: {record['limits']['tolerance']:g}.",
        *(
            f"{name} failed: {figures['error']}"
            for name, figures in record["checkpoints"].items()
            if "error" in figures
        ),
        *(f"{name}: {failure}." for name, figures in measured.items() for failure in figures["failures"]),
    ]
    columns = {name: _shown(figures) for name, figures in measured.items()}
    kinds = list(dict.fromkeys(kind for column in columns.values() for kind in column))
    cells = [(kind, *(column.get(kind, "") for column in columns.values())) for kind in kinds]
    aligned = ("left", *["right"] * len(columns))
    table = tabulate(cells, ("", *columns), tablefmt="github", disable_numparse=True, colalign=aligned)
    return "\n".join(f"- {each}" for each in head) + (f"\n\n{table}" if columns else "")


def line(figures: Figures) -> str:
    """One line about a checkpoint, without a table."""
    if "error" in figures:
        return figures["error"]
    return "; ".join([*(f"{kind} {value}" for kind, value in _shown(figures).items()), *figures["failures"]])


def _shown(figures: Figures) -> dict[str, str]:
    kinds, compared = figures["requests"], figures["comparison"]
    shown = {
        "requests finished": f"{sum(kinds.values()):,} ({', '.join(f'{n:,} {kind}' for kind, n in kinds.items())})",
        "requests aborted": f"{figures['aborted']:,}",
        "tokens of prompts": f"{figures['prompt_tokens']:,}",
        "tokens generated": f"{figures['new_tokens']:,}",
    }
    for kind, memory in figures["memory"].items():
        shown[f"memory of the {kind}, MiB, first and last"] = (
            f"{memory['first'] / MIB:,.0f} to {memory['last'] / MIB:,.0f}"
        )
        shown[f"memory of the {kind}, MiB per minute"] = f"{memory['slope_per_minute'] / MIB:+.3f}"
    if compared["answers"]:
        shown |= {
            "answers compared": f"{compared['answers']}",
            "difference of log-probabilities, median": f"{compared['median_difference']:.4f}",
            "difference of log-probabilities, median of the worst answer": f"{compared['worst_answer']:.4f}",
            "answers with equal tokens": f"{compared['equal_answers']}",
            "tokens before the first difference": f"{compared['tokens_before_difference']} of {compared['tokens']}",
        }
        if compared["largest_gap"] is not None:
            shown["largest difference between exchanged tokens"] = f"{compared['largest_gap']:.4f}"
    return shown
