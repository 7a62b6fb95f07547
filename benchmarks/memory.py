"""Measures the peak memory of a job that opens, compresses and saves a sharded random model. Linux, CPU.

    python -m benchmarks.memory                       # about 7 GB, hours on a slow CPU: see --openings, --bits
    python -m benchmarks.memory --small               # about 100 MB, for a trial
    python -m benchmarks.memory --render

Each job runs in its own process, which first runs the same job on a tiny model, so that all modules are imported. The
resident memory after that is the start, and the peak is the increase of ``VmHWM`` over the start. The peak includes
pages of mapped files, although the kernel drops them when memory is short, so it is the stricter of two figures. The
other one, anonymous memory, is sampled by the parent process. The limit is 1.15 times the bytes of the checkpoint,
plus the bytes of one layer.

Ways to open the model, all provided by the toolkit:

fused
    ``oneshot(model=path)``. transformers merges the experts of a layer into one tensor while the files are mapped, and
    weights that stay mapped (attention, norms) keep all pages of their file in memory. Then ``linearize_moe`` copies
    every expert, and keeps all merged tensors until the last expert is copied. Both happen before the first modifier
    runs.
linear
    The same call inside ``with load_quantizable_moe():``, which opens experts one by one: weights stay in the mapped
    files until they are pruned, layer by layer. During this, transformers resolves lazy modules that need torchvision.
    If it is not installed, remove these modules first, as :func:`run_job` does.
offloaded
    ``from_pretrained(device_map="auto_offload")`` inside ``with load_context():``, with the bytes of two layers in CPU
    memory and the rest on disk, then ``oneshot(model=model)``.

Earlier measurements, with a model of 508 MB, layers of 40 MB, and 4 or 16 tokens: fused takes 1.38 GB, of which
opening takes 1.06. With 4 bits, linear takes 0.50 and offloaded 0.12. Before `modeling/memory.py`, these were 0.84 and
0.76, because glibc kept freed weights, and because reconstruction wrote fitted columns into pages of the mapped files,
which made these pages anonymous.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.commands import portable
from benchmarks.markers import RESULTS, markers, write_between
from benchmarks.plan import processor
from benchmarks.resident import Resident, Sampler, reset_peak, resident
from moe_coverage_plugin.files.atomic import write_atomically

# Qwen3-30B-A3B with half of its experts, so that a checkpoint has several layers; --gigabytes sets their number
FULL: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
}
SMALL: dict[str, Any] = FULL | {
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
    "vocab_size": 1024,
}
WARM_UP: dict[str, Any] = SMALL | {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}
OPENINGS = ("fused", "linear", "offloaded")
RECIPES = {16: "recommended_p50", 4: "fisher_p25_q4"}
SPARSITY = 0.25
LIMIT = 1.15
PACKAGES = ("moe-coverage-plugin", "llmcompressor", "compressed-tensors", "transformers", "accelerate", "torch")
RESULT = Path(__file__).with_name("results") / "memory.json"
NAME = "memory"
BEGIN, END = markers(NAME)
INTRODUCTION = f"""## Peak memory of a complete job

Written by `python -m benchmarks.memory --render`. The docstring of `benchmarks/memory.py` describes the openings
and how memory is counted.

{BEGIN}
{END}
"""


@dataclass(frozen=True)
class Phase:
    """A phase of a job.

    Attributes:
        name: ``open``, ``compress`` or ``save``.
        begin: start by ``time.monotonic``.
        end: end by ``time.monotonic``.
        peak: peak of resident bytes during the phase, counted by the kernel.
    """

    name: str
    begin: float
    end: float
    peak: int


@dataclass(frozen=True)
class Work:
    """Options of a job: how to open the model, bits of a weight, calibration tokens, and seed."""

    opening: str
    bits: int
    tokens: int
    seed: int


def run_job(checkpoint: Path, output: Path, work: Work, cpu_bytes: int) -> list[Phase]:
    """Open, compress and save a model in this process: the three phases of ``oneshot``, called separately."""
    import torch
    from datasets import Dataset
    from llmcompressor.datasets import get_calibration_dataloader
    from llmcompressor.entrypoints.oneshot import Oneshot
    from llmcompressor.entrypoints.utils import post_process
    from llmcompressor.modeling.moe.linearize import load_quantizable_moe
    from llmcompressor.utils.dev import load_context
    from transformers import AutoModelForCausalLM

    from moe_coverage_plugin import recipe_path

    phases: list[Phase] = []
    clock = time.monotonic()

    def done(name: str) -> None:
        nonlocal clock
        begin, clock = clock, time.monotonic()
        phases.append(Phase(name, begin, clock, resident().peak))
        reset_peak()

    ids = torch.randint(2, 500, (1, work.tokens), generator=torch.Generator().manual_seed(work.seed))
    options: dict[str, Any] = {
        "dataset": Dataset.from_dict({"input_ids": ids.tolist()}),
        "num_calibration_samples": 1,
        "max_seq_length": work.tokens,
        "recipe": recipe_path(RECIPES[work.bits]),
        "recipe_args": {"sparsity": SPARSITY},
        "moe_calibrate_all_experts": False,
        "output_dir": str(output),
    }
    reset_peak()
    model: Any = str(checkpoint)
    if work.opening == "offloaded":
        offload: dict[str, Any] = {"offload_folder": f"{output}.offload", "max_memory": {"cpu": cpu_bytes}}
        with load_context():
            model = AutoModelForCausalLM.from_pretrained(model, device_map="auto_offload", **offload)
    opener: AbstractContextManager = load_quantizable_moe() if work.opening == "linear" else nullcontext()
    with opener:
        job: Any = Oneshot(model=model, **options)
    done("open")
    batches = get_calibration_dataloader(job.dataset_args, job.processor)
    job.apply_recipe_modifiers(batches, recipe_stage=job.recipe_args.stage)
    done("compress")
    post_process(job.model_args, job.recipe_args, job.output_dir)
    done("save")
    return phases


def child(checkpoint: Path, output: Path, work: Work, cpu_bytes: int, result: Path) -> None:
    """Run a tiny job, then the measured one, and write the phases to ``result``."""
    run_job(checkpoint.with_name("warm_up"), output.with_name("warm_up_out"), work, cpu_bytes)
    gc.collect()
    start = resident()
    phases = run_job(checkpoint, output, work, cpu_bytes)
    result.write_text(json.dumps({"start": start._asdict(), "phases": [asdict(phase) for phase in phases]}))


def measure(checkpoint: Path, directory: Path, work: Work, layer_bytes: int) -> dict[str, Any]:
    """Run a job in its own process and sample its memory.

    Args:
        checkpoint: checkpoint to compress; the tiny one is ``warm_up`` in the same directory.
        directory: directory for the output, which is deleted at the end.
        work: options of the job.
        layer_bytes: bytes of one layer of the checkpoint.
    """
    from benchmarks.shards import stored_bytes

    with tempfile.TemporaryDirectory(dir=directory) as folder:
        place = Path(folder)
        arguments = [str(checkpoint), str(place), json.dumps(asdict(work)), str(2 * layer_bytes)]
        with (place / "log.txt").open("w") as log:
            command = [sys.executable, "-m", "benchmarks.memory", "--child", *arguments]
            process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=log, stderr=log)
            sampler = Sampler(process.pid)
            sampler.start()
            code = process.wait()
        if code:
            raise RuntimeError(f"{work} exited with status {code}: {(place / 'log.txt').read_text()[-3000:]}")
        result = json.loads((place / "result.json").read_text())
        stored, source = stored_bytes(place / "out"), stored_bytes(checkpoint)
    start, phases = Resident(**result["start"]), [Phase(**phase) for phase in result["phases"]]
    peak = max(phase.peak for phase in phases) - start.total
    limit = LIMIT * source + layer_bytes
    return asdict(work) | {
        "start_bytes": start.total,
        "checkpoint_bytes": source,
        "layer_bytes": layer_bytes,
        "stored_bytes": stored,
        "peak_bytes": peak,
        "bar_bytes": int(limit),
        "kept": peak <= limit,
        "phases": {
            phase.name: {
                "seconds": phase.end - phase.begin,
                "peak_bytes": phase.peak - start.total,
                "anonymous_bytes": sampler.most("anonymous", phase.begin, phase.end) - start.anonymous,
                "mapped_bytes": sampler.most("mapped", phase.begin, phase.end) - start.mapped,
            }
            for phase in phases
        },
    }


def write_models(directory: Path, shape: dict[str, Any], gigabytes: float, seed: int) -> tuple[Path, int]:
    """Write the checkpoint to compress and the tiny one; return the path of the former and the bytes of its layers."""
    from transformers import Qwen3MoeConfig

    from benchmarks.shards import write_shards

    write_shards(directory / "warm_up", Qwen3MoeConfig(**WARM_UP), seed)
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"] + shape["num_key_value_heads"]
    experts = 3 * hidden * shape["moe_intermediate_size"] * shape["num_experts"]
    attention = 2 * hidden * shape["head_dim"] * heads
    layer_bytes = 2 * (experts + attention + hidden * shape["num_experts"])
    vocabulary_bytes = 2 * 2 * hidden * shape["vocab_size"]
    layers = max(2, round((gigabytes * 1e9 - vocabulary_bytes) / layer_bytes))
    write_shards(directory / "model", Qwen3MoeConfig(**shape, num_hidden_layers=layers), seed)
    return directory / "model", layer_bytes


def section(record: dict[str, Any]) -> str:
    """Settings, and a table with a row for each job."""
    shape, runs = record["shape"], record["runs"]
    head = [
        f"CPU: {record['cpu']}, {record['threads']} threads, {record['memory_bytes'] / 2**30:.0f} GiB of memory.",
        f"Versions: {', '.join(f'{package} {number}' for package, number in record['versions'].items())}.",
        *(f"Command: `{command}`" for command in dict.fromkeys(run["command"] for run in runs)),
        f"Seed: {record['seed']}.",
        f"Shape: Qwen3-MoE with {shape['num_experts']} experts of {shape['moe_intermediate_size']} channels, hidden "
        f"size {shape['hidden_size']}, vocabulary of {shape['vocab_size']}, in bfloat16, one file per layer.",
        f"Job: remove a quarter of the expert channels by gradients, with reconstruction, and for 4 bits quantize to "
        f"W4A16; {runs[0]['tokens']} calibration tokens.",
        "GB are 10^9 bytes more than the resident memory after all modules are imported. The limit is 1.15 times the "
        "checkpoint, plus one layer. `open`, `compress`, `save`: the peak of each phase, and in brackets the peak of "
        "anonymous memory.",
    ]
    sizes, phases = ("checkpoint", "layer", "stored", "limit", "peak"), ("open", "compress", "save")
    headers = ("opening", "bits", *sizes, *phases, "minutes")
    rows = [_row(run) for run in runs]
    table = tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 10))
    return "\n".join(f"- {line}" for line in head) + "\n\n" + table


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    phases = run["phases"].values()
    sizes = ("checkpoint_bytes", "layer_bytes", "stored_bytes", "bar_bytes", "peak_bytes")
    return (
        run["opening"],
        str(run["bits"]),
        *(f"{run[name] / 1e9:.2f}" for name in sizes),
        *(f"{phase['peak_bytes'] / 1e9:.2f} ({phase['anonymous_bytes'] / 1e9:.2f})" for phase in phases),
        f"{sum(phase['seconds'] for phase in phases) / 60:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=7.0, help="approximate size of the checkpoint")
    parser.add_argument("--openings", nargs="+", choices=OPENINGS, default=["linear", "offloaded"])
    parser.add_argument("--bits", nargs="+", type=int, choices=sorted(RECIPES), default=[16, 4])
    parser.add_argument("--tokens", type=int, default=16, help="tokens of the only calibration window")
    parser.add_argument("--small", action="store_true", help="use small layers, for a trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--directory", type=Path, help="directory for models, which are deleted at the end; needs twice their size"
    )
    parser.add_argument(
        "--output", type=Path, default=RESULT, help="JSON file; runs on the same machine and shape are added to it"
    )
    parser.add_argument("--render", action="store_true", help="measure nothing, write the file into RESULTS.md")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        checkpoint, place, work, cpu_bytes = args.child
        child(
            Path(checkpoint),
            Path(place) / "out",
            Work(**json.loads(work)),
            int(cpu_bytes),
            Path(place) / "result.json",
        )
    elif args.render:
        write_between(RESULTS, NAME, INTRODUCTION, section(json.loads(args.output.read_text())))
    else:
        measure_all(args)


def measure_all(args: argparse.Namespace) -> None:
    """Run all jobs one after the other, and write the file after each."""
    shape = SMALL if args.small else FULL
    record: dict[str, Any] = {
        "cpu": processor(),
        "threads": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": {package: version(package) for package in PACKAGES},
        "seed": args.seed,
        "shape": shape,
    }
    earlier = json.loads(args.output.read_text()) if args.output.exists() else {}
    runs = earlier.pop("runs", [])
    record["runs"] = runs if earlier == record else []
    command = portable("benchmarks.memory", sys.argv[1:], {"--directory", "--output"})
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        directory = Path(folder)
        checkpoint, layer_bytes = write_models(directory, shape, args.gigabytes, args.seed)
        for opening in args.openings:
            for bits in args.bits:
                work = Work(opening, bits, args.tokens, args.seed)
                run: dict[str, Any] = {**measure(checkpoint, directory, work, layer_bytes), "command": command}
                record["runs"].append(run)
                print(f"{opening}, {bits} bits: {run['peak_bytes'] / 1e9:.2f} GB, limit {run['bar_bytes'] / 1e9:.2f}")
                write_atomically(args.output, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
