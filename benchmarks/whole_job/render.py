"""Renders measured runs as tables, and writes the section of RESULTS.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.markers import markers, write_sections
from benchmarks.whole_job.shapes import SHAPES, experts_of
from moe_coverage_plugin.files.atomic import write_atomically

NAME = "whole_job"
BEGIN, END = markers(NAME)
INTRODUCTION = f"""## A whole job, phase by phase

Written by `python -m benchmarks.whole_job --render`. The docstring of `benchmarks/whole_job/__main__.py` describes the
phases and what is counted.

{BEGIN}
{END}
"""
FORWARD = "plain forward"
TITLES = {
    "ours": "this package",
    "ours-16bit": "this package, in 16 bits",
    "reap": "REAP + W4A16 of llm-compressor",
    "gptq": "W4A16 of llm-compressor",
}
GIB = 2**30


def write_results(files: Sequence[Path], path: Path) -> None:
    """Write the tables of the files between the markers of ``path``, at its end if it has none."""
    if path.exists() and BEGIN not in (text := path.read_text(encoding="utf-8")):
        write_atomically(path, f"{text.rstrip()}\n\n{INTRODUCTION}".encode())
    write_sections(path, NAME, INTRODUCTION, files, section)


def section(record: dict[str, Any]) -> str:
    """Settings, the phases of all runs, the sums of the jobs, and the parts of the longest phases."""
    config, runs = record["config"], record["runs"]
    title = SHAPES[record["shape"]].title
    layers, full = config["num_hidden_layers"], SHAPES[record["shape"]].config["num_hidden_layers"]
    head = [
        *_machines(runs),
        *(f"Command: `{command}`" for command in dict.fromkeys(run["command"] for run in runs)),
        f"Seed: {record['seed']}.",
        f"Shape: {title} with {layers} {'of its ' + str(full) + ' ' if layers < full else ''}layers of "
        f"{experts_of(config)} experts, random weights; samples of {record['length']} random tokens.",
        "s/M tokens: seconds for a million calibration tokens; over forward: divided by those of the plain forward.",
        *_of_process(runs),
        *(f"{run['job']}: opened by {_listed(run['serving_versions'])}." for run in runs if "serving_versions" in run),
        *(f"{run['job']}: {run['left_out']}." for run in runs if "left_out" in run),
        *(f"{run['job']} failed: {run['error']}" for run in runs if "error" in run),
        *_of_plans(runs),
    ]
    parts = [f"### {title}, {layers} layers", "\n".join(f"- {line}" for line in head), _phases(runs), _totals(runs)]
    return "\n\n".join(part for part in [*parts, _parts(runs)] if part)


def _of_process(runs: Sequence[dict[str, Any]]) -> list[str]:
    if any("host_peak_of" in phase for run in runs for phase in run["phases"]):
        return ["Host memory is the peak since the process started, because this machine does not let it be reset."]
    return []


def _of_plans(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What jobs on a budget have in common with the job in memory."""
    found = {run["job"]: run["plan_equals"] for run in runs if "plan_equals" in run}
    lines = []
    for job, equal in found.items():
        if equal is None:
            lines.append(f"{job}: its plan was not compared, because the job in memory has no checkpoint here.")
            continue
        same = [name for name, is_equal in equal.items() if is_equal]
        other = [name for name, is_equal in equal.items() if not is_equal]
        parts = [f"{', '.join(same)} equal those of the job in memory bit for bit"] * bool(same)
        parts += [f"{', '.join(other)} differ from those of the job in memory"] * bool(other)
        lines.append(f"{job}: {'; '.join(parts)}.")
    return lines


def _titles(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Titles of jobs, of those on a budget too."""
    places = {"cpu": "in host memory", "disk": "on disk"}
    budgets = {
        run["job"]: f"{TITLES['ours']} with {run['gpu_memory_gib']:g} GiB of GPU memory, weights "
        f"{places.get(run['device_map'], run['device_map'])}"
        for run in runs
        if run.get("gpu_memory_gib") is not None and run["job"] not in TITLES
    }
    return TITLES | budgets


def _machines(runs: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each environment, with the names of its jobs if there are several."""
    jobs: dict[str, list[str]] = {}
    for run in runs:
        jobs.setdefault(_machine(run["environment"]), []).append(run["job"])
    if len(jobs) == 1:
        return [f"Machine: {machine}" for machine in jobs]
    return [f"Machine of {', '.join(dict.fromkeys(names))}: {machine}" for machine, names in jobs.items()]


def _machine(environment: dict[str, Any]) -> str:
    card = environment["card"]
    where = f"{card} (driver {environment['driver']})" if card else "No card"
    return (
        f"{where}, {environment['cpu']}, {environment['threads']} threads, "
        f"{environment['host_bytes'] / GIB:.0f} GiB of memory. Versions: {_listed(environment['versions'])}."
    )


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{package} {number}" for package, number in versions.items())


def unit(runs: Sequence[dict[str, Any]]) -> float | None:
    """Seconds of a plain forward of a token, the last one measured."""
    found = [
        phase["seconds"] / run["tokens"]
        for run in runs
        for phase in run["phases"]
        if phase["name"] == FORWARD and phase["done"]
    ]
    return found[-1] if found else None


def _phases(runs: Sequence[dict[str, Any]]) -> str:
    forward = unit(runs)
    rows = [_row(run, phase, forward) for run in runs for phase in run["phases"]]
    memory = ("GPU allocated GiB", "GPU reserved GiB", "host GiB", "of it anonymous", "written GB")
    headers = ("job", "phase", "seconds", "tokens", "s/M tokens", "over forward", *memory)
    aligned = ("left", "left", *["right"] * (len(headers) - 2))
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=aligned)


def _row(run: dict[str, Any], phase: dict[str, Any], forward: float | None) -> tuple[str, ...]:
    name = phase["name"]
    if not phase["done"]:
        done, of = phase.get("progress", [0, 0])
        # the process was killed, or still runs
        name += f" (ended at {done} of {of})" if of else " (did not end)"
    depends = phase["done"] and run["tokens"] and "progress" in phase
    per_token = phase["seconds"] / run["tokens"] if depends else None
    sizes = ("gpu_allocated_bytes", "gpu_reserved_bytes", "host_peak_bytes", "host_anonymous_bytes")
    return (
        run["job"],
        name,
        f"{phase['seconds']:,.1f}",
        f"{run['tokens']:,}" if depends else "",
        "" if per_token is None else f"{1e6 * per_token:,.1f}",
        "" if per_token is None or forward is None else f"{per_token / forward:.2f}",
        *("" if phase.get(size) is None else f"{phase[size] / GIB:.1f}" for size in sizes),
        f"{phase.get('written_bytes', 0) / 1e9:.1f}",
    )


def _totals(runs: Sequence[dict[str, Any]]) -> str:
    """Sums of complete jobs without serving, of the last run of each phase and of what it went on from, and peaks."""
    rows = []
    for job, title in _titles(runs).items():
        chosen = [run for run in runs if run["job"] == job and "serving_versions" not in run]
        phases = {phase["name"]: phase for run in chosen for phase in run["phases"] if phase["name"] != FORWARD}
        # a run that goes on from a killed one has done only the rest
        resumed = any(run.get("resumed") for run in chosen)
        killed = [phase for run in chosen for phase in run["phases"] if resumed and not phase["done"]]
        stored = [run["stored_bytes"] for run in chosen if "stored_bytes" in run]
        if not stored or not all(phase["done"] for phase in phases.values()):
            continue
        tokens = sorted({run["tokens"] for run in chosen if run["tokens"]})
        gpu = [phase["gpu_allocated_bytes"] for phase in phases.values() if phase["gpu_allocated_bytes"] is not None]
        rows.append(
            (
                title,
                " and ".join(f"{count:,}" for count in tokens),
                f"{sum(phase['seconds'] for phase in (*phases.values(), *killed)) / 60:,.1f}",
                f"{max(gpu) / GIB:.1f}" if gpu else "",
                f"{max(phase['host_peak_bytes'] for phase in phases.values()) / GIB:.1f}",
                f"{stored[-1] / 1e9:.1f}",
            )
        )
    if not rows:
        return ""
    headers = ("complete job", "tokens", "minutes", "GPU GiB", "host GiB", "stored GB")
    aligned = ("left", *["right"] * 5)
    table = tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=aligned)
    if len({row[1] for row in rows}) > 1:
        table += (
            "\n\nJobs with fewer tokens would take longer with as many as the others, but not in proportion: their "
            "minutes are a lower limit."
        )
    return table


def _parts(runs: Sequence[dict[str, Any]]) -> str:
    """Where the time of the phases with parts went; of several runs of a job, the last."""
    phases = {(run["job"], phase["name"]): phase for run in runs for phase in run["phases"] if phase["parts"]}
    rows = [
        (
            job,
            name,
            part,
            f"{values['calls']:,}",
            f"{values['seconds']:,.1f}",
            f"{values['seconds'] / phase['seconds']:.0%}",
        )
        for (job, name), phase in phases.items()
        for part, values in sorted(phase["parts"].items(), key=lambda item: -item[1]["seconds"])
    ]
    if not rows:
        return ""
    headers = ("job", "phase", "part, without the parts inside it", "calls", "seconds", "of the phase")
    aligned = ("left", "left", "left", "right", "right", "right")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=aligned)
