"""Writes the sections of RESULTS.md about serving from measured files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate  # pyright: ignore[reportMissingModuleSource]  # not in vLLM's environment

from benchmarks.markers import markers, write_sections
from benchmarks.serving.ratios import Figures, comparable, imbalance, ratios

NAME = "serving"
BEGIN, END = markers(NAME)
INTRODUCTION = f"""## Serving, end to end

Written by `python -m benchmarks.serving --render`. Each variant is a model with random weights in an engine of its
own: `stock4` is unpruned in W4A16, `stock8` in FP8_DYNAMIC, and `stock16` in bfloat16; `ours4`, `ours8` and `ours16`
are the same with a quarter of the expert channels removed.

{BEGIN}
{END}
"""
RANKS_NAME = "expert ranks"
RANKS_BEGIN, RANKS_END = markers(RANKS_NAME)
RANKS_INTRODUCTION = f"""## Ranks of expert parallelism

Written by `python -m benchmarks.serving.expert_ranks --render`. Calibrated checkpoints, served over several ranks that
hold entire experts; every rank counted its bytes and the tokens that were routed to its experts.

{RANKS_BEGIN}
{RANKS_END}
"""


def write_results(files: Sequence[Path], path: Path) -> None:
    """Write the tables of the files' runs between the markers of ``path``.

    Raises:
        CoverageError: if the page has no markers.
    """
    write_sections(path, NAME, INTRODUCTION, files, section)


def write_expert_ranks(files: Sequence[Path], path: Path) -> None:
    """Write the tables of runs of ``benchmarks.serving.expert_ranks`` between their markers of ``path``.

    Raises:
        CoverageError: if the page has no markers.
    """
    write_sections(path, RANKS_NAME, RANKS_INTRODUCTION, files, expert_ranks_section)


def expert_ranks_section(record: dict[str, Any]) -> str:
    """What each rank held and computed, and the ratios of the busiest rank to the mean, as Markdown."""
    head = [
        f"Card: {record['environment']['card']}, {record['ranks']} ranks{_engines(record)}.",
        *software(record),
        f"Checkpoint: {record['checkpoint']}; {record['tokens']:,} tokens.",
    ]
    ranks = {
        f"rank {rank}": {kind: f"{value:,}" for kind, value in row.items()}
        for rank, row in enumerate(record["by_rank"])
    }
    titles = {"counted": "counted", "expected": "expected of calibration", "by_number": "counted, vLLM's placement"}
    names = {"tokens": "routed tokens", "work": "channels times tokens"}
    balance = {
        title: {
            f"busiest rank of each layer / mean: {names[load]}": f"{row[kind]:.3f}"
            for load, row in record["ratios"].items()
        }
        for kind, title in titles.items()
    }
    return "\n\n".join(("\n".join(f"- {line}" for line in head), _table(ranks), _table(balance)))


def _engines(record: dict[str, Any]) -> str:
    # measured files of one engine need not have the number
    count = record.get("data_parallel_size", 1)
    return f" of {count} data-parallel engines, which gather the tokens of all" if count > 1 else ""


def machine(record: dict[str, Any]) -> list[str]:
    """Card, versions, command and seed of a record."""
    return [f"Card: {record['environment']['card']}{_ranks(record['request'])}.", *software(record)]


def software(record: dict[str, Any]) -> list[str]:
    """Versions, command and seed of a record."""
    versions = record["environment"]["versions"]
    return [
        f"Versions: {', '.join(f'{package} {version}' for package, version in versions.items())}.",
        f"Command: `{record['command']}`",
        f"Seed: {record['seed']}.",
    ]


def section(record: dict[str, Any]) -> str:
    """Settings, figures of every variant, and their ratios as Markdown."""
    shape, request = record["shape"], record["request"]
    measured = {name: figures for name, figures in record["variants"].items() if "error" not in figures}
    head = [
        *machine(record),
        *(["Bytes are those of the rank with most bytes."] if request["tensor_parallel_size"] > 1 else []),
        f"Shape: {shape['num_hidden_layers']} layers of {shape['num_experts']} experts with "
        f"{shape['moe_intermediate_size']} channels before pruning, hidden size {shape['hidden_size']}, "
        f"{shape['num_experts_per_tok']} experts per token.",
        f"Decoding: {request['new']} tokens after prompts of {request['prompt']}, the fastest of repeated runs; "
        f"{'without graphs' if request['enforce_eager'] else 'with the default graphs of vLLM'}.",
        *(f"{name} failed: {figures['error']}" for name, figures in record["variants"].items() if "error" in figures),
    ]
    parts = ["\n".join(f"- {line}" for line in head), _table({n: _shown(f) for n, f in measured.items()})]
    columns = ratios(record["variants"])
    if columns:
        parts.append(_table({n: {kind: f"{v:.3f}" for kind, v in ratio.items()} for n, ratio in columns.items()}))
    return "\n\n".join(parts)


def _ranks(request: dict[str, Any]) -> str:
    count = request["tensor_parallel_size"]
    if count == 1:
        return ""
    # measured files of the first releases do not have the option
    experts = ", each with entire experts (expert parallelism)" if request.get("enable_expert_parallel") else ""
    return f", tensor parallelism over {count} of them{experts}"


def _shown(figures: Figures) -> dict[str, str]:
    shown = {kind: f"{value:,.0f}" for kind, value in comparable(figures).items() if "seconds" not in kind}
    seconds = {kind: f"{value:.4f}" for kind, value in comparable(figures).items() if "seconds" in kind}
    routing = figures["routing"]
    met = routing["distinct_experts"]
    if met is not None:
        shown[f"different experts of {routing['tokens']} tokens in a layer"] = (
            f"{met:.1f} ({routing['if_even']:.1f} if all were equally likely)"
        )
    if len(figures["expert_bytes_by_rank"]) > 1:
        shown["largest bytes of experts on a rank / mean"] = f"{1 + imbalance(figures):.4f}"
    return shown | seconds | {"seconds to start": f"{figures['startup_seconds']:.0f}"}


def _table(columns: dict[str, dict[str, str]]) -> str:
    kinds = list(next(iter(columns.values())))
    cells = [(kind, *(column.get(kind, "") for column in columns.values())) for kind in kinds]
    aligned = ("left", *["right"] * len(columns))
    return tabulate(cells, ("", *columns), tablefmt="github", disable_numparse=True, colalign=aligned)
