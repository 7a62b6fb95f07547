"""Measures a complete job on a model with random weights and the shape of a published one, phase by phase.

The job is the recommended recipe with W4A16 at a quarter of the expert channels, by the public ``oneshot``; beside it,
on the same tokens, llm-compressor's REAP with GPTQ, GPTQ alone, and a plain forward pass as the unit of ratios. Phases
of the command line, which hand over by files in ``--directory``, so that each can be a command of its own:

checkpoint
    Draws the weights on the card and writes them in bfloat16.
opening, forward, scores, compression
    This package's job. It opens the model; takes the tokens through it; measures and saves scores (a pass with
    gradients, then channel interactions); plans, fits, prunes and quantizes layer by layer, and saves. ``compression``
    takes the saved scores unless ``scores`` is in the same command.
serving
    Opens the result in vLLM, by the interpreter ``--serve-python``, and generates one token.
reap, gptq
    The jobs of llm-compressor, with all its defaults except that experts see routed tokens only
    (``moe_calibrate_all_experts=False``), which is faster. Their results are deleted.

With ``--bits 16``, this package's job does not quantize. With ``--gpu-memory``, it has its weights in host memory
or on disk, and allocations beyond the limit fail. Each is a job of its own in the tables. The latter says whether
scores, widths and kept channels equal those of the job in memory, which must be in the same directory.

Each job runs in a process of its own. Functions of this package and of the toolkit are timed from outside, by
``benchmarks/whole_job/hooks.py``, which wraps them and waits for the card before it reads the clock. For each
phase, the file has seconds, peaks of GPU memory (``torch.cuda.max_memory_allocated``, ``max_memory_reserved``) and of
host memory (``VmHWM``, which counts mapped files, and sampled anonymous memory), and by how much the directory has
grown. It is written when a phase starts and ends, and every few seconds in between: a command that is killed leaves
what it has measured, and ``--background`` outlives the shell. Commands that run at once can share the file.

    python -m benchmarks.whole_job --directory out/whole_job --output out/whole_job.json
    python -m benchmarks.whole_job --directory out/whole_job --output out/whole_job.json --phases checkpoint
    python -m benchmarks.whole_job --directory out/whole_job --output out/whole_job.json --phases forward,scores
    python -m benchmarks.whole_job --directory out/whole_job --output out/whole_job.json --phases compression
    python -m benchmarks.whole_job --directory out/whole_job --output out/whole_job.json --background --phases gptq
    python -m benchmarks.whole_job --directory out/whole_job --output out/whole_job.json --phases reap --samples 64
    python -m benchmarks.whole_job --directory out/whole_job --output out/job.json --gpu-memory 24 --phases scores
    python -m benchmarks.whole_job --directory out/whole_job --output out/job.json --gpu-memory 24 --phases compression
    python -m benchmarks.whole_job --shape tiny --samples 4 --length 64 --directory /tmp/job --output /tmp/job.json
    python -m benchmarks.whole_job --render out/whole_job.json
    python -m benchmarks.whole_job --needs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.whole_job.shapes import SHAPES
from moe_coverage_plugin.manifest import CoverageError

MODULE = "benchmarks.whole_job"
# phases of one process
JOBS = (("checkpoint",), ("opening", "forward", "scores", "compression"), ("serving",), ("reap",), ("gptq",))
PHASES = [phase for job in JOBS for phase in job]
BESIDE = ["reap", "gptq"]
# options that change no figure
SILENT, OF_THIS_MACHINE = ("--quiet", "--background"), {"--output", "--directory", "--serve-python"}
# shapes of the page docs/scaling.md
COMPUTED = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")


def main(arguments: list[str] | None = None) -> None:
    """Measure, render or compute."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    args = parser.parse_args(given)
    try:
        if args.render:
            from benchmarks.markers import RESULTS
            from benchmarks.whole_job.render import write_results

            write_results(args.render, args.page or RESULTS)
        elif args.needs:
            from benchmarks.whole_job.needs import table

            print(table({name: SHAPES[name] for name in COMPUTED}, SHAPES[COMPUTED[0]]))
        elif args.directory is None or args.output is None:
            raise CoverageError(
                "a run needs a place for checkpoints and one for results: give --directory and --output"
            )
        elif args.background:
            _start(given, args.directory)
        else:
            _measure(given, args)
    except CoverageError as error:
        parser.error(str(error))


def _measure(given: list[str], args: argparse.Namespace) -> None:
    """Run the phases of one job here, and those of several in processes of their own."""
    phases: list[str] = args.phases if args.beside else [each for each in args.phases if each not in BESIDE]
    jobs = [[each for each in job if each in phases] for job in JOBS]
    jobs = [job for job in jobs if job]
    if not jobs:
        raise CoverageError(f"--phases {','.join(args.phases)} with --no-beside leaves nothing to measure")
    if len(jobs) == 1:
        _run(given, args, jobs[0])
        return
    failed = []
    for job in jobs:
        # the last --phases counts
        command = [sys.executable, "-m", MODULE, *given, "--phases", ",".join(job), "--quiet"]
        if subprocess.run(command, check=False).returncode:
            failed.append(job[0])
            if job == ["checkpoint"]:
                break
    _show(args.output)
    if failed:
        sys.exit(f"{', '.join(failed)} failed: see the messages above")


def _run(given: list[str], args: argparse.Namespace, phases: list[str]) -> None:
    # imported here, because rendering and help need no toolkit
    import torch

    from benchmarks.commands import portable
    from benchmarks.whole_job.jobs import Work, run_phase_group
    from benchmarks.whole_job.record import Recorder

    shape = SHAPES[args.shape].with_layers(args.layers)
    device_map = args.device_map or ("cuda" if torch.cuda.is_available() and args.gpu_memory is None else "cpu")
    work = Work(
        args.directory,
        shape,
        args.samples,
        args.length,
        args.batch_size,
        args.seed,
        None if device_map == "cpu" else device_map,
        args.serve_python,
        args.serve_options,
        args.gpu_memory,
        args.bits,
    )
    args.directory.mkdir(parents=True, exist_ok=True)
    settings = {"shape": args.shape, "config": shape.config, "length": args.length, "seed": args.seed}
    run = {
        "job": work.name if phases[0] in JOBS[1] or phases == ["serving"] else phases[0],
        "command": portable(MODULE, [each for each in given if each not in SILENT], OF_THIS_MACHINE),
        "samples": args.samples,
        "tokens": 0 if phases[0] in ("checkpoint", "serving") else args.samples * args.length,
        "batch_size": args.batch_size,
        "device_map": device_map,
        "gpu_memory_gib": args.gpu_memory,
    }
    recorder = Recorder(args.output, settings, run, args.directory)
    try:
        run_phase_group(phases, work, recorder)
    except Exception as error:
        recorder.note(error=f"{type(error).__name__}: {error}")
        raise
    if not args.quiet:
        _show(args.output)


def _show(file: Path) -> None:
    from benchmarks.whole_job.render import section

    if file.exists():
        print(section(json.loads(file.read_text())))


def _start(given: list[str], directory: Path) -> None:
    """Run the command without ``--background`` in a session of its own, which a closed shell does not end."""
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "whole_job.log"
    command = [sys.executable, "-m", MODULE, *(each for each in given if each != "--background")]
    with log.open("a") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True
        )
    print(f"process {process.pid} writes to {log}")


def _phases(argument: str) -> list[str]:
    names = argument.split(",")
    if unknown := [name for name in names if name not in PHASES]:
        raise argparse.ArgumentTypeError(f"unknown phase {unknown[0]!r}: choose of {', '.join(PHASES)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {MODULE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a batch")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and tokens")
    parser.add_argument("--phases", type=_phases, default=PHASES, help="separated by commas (default: all)")
    parser.add_argument(
        "--beside",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the jobs of llm-compressor too, if --phases has them",
    )
    parser.add_argument(
        "--device-map", help="place of the weights in this package's job (default: cuda with a card, otherwise cpu)"
    )
    parser.add_argument(
        "--gpu-memory",
        type=float,
        metavar="GIB",
        help="let this package's job take no more GPU memory, with its weights in host memory (or --device-map disk), "
        "and compare its plan with that of the job in memory, if --directory has it",
    )
    parser.add_argument(
        "--serve-python", help="interpreter of the environment with vLLM; without it, serving is left out"
    )
    parser.add_argument("--bits", type=int, choices=(4, 16), default=4, help="of the weights of this package's job")
    parser.add_argument("--serve-options", type=json.loads, default={}, help="options of vllm.LLM, as JSON")
    parser.add_argument("--directory", type=Path, help="local disk for checkpoints; files in it are replaced")
    parser.add_argument("--output", type=Path, help="JSON file to add the runs to")
    parser.add_argument("--background", action="store_true", help="return at once, and go on without the shell")
    parser.add_argument("--quiet", action="store_true", help="print no tables")
    parser.add_argument("--render", type=Path, nargs="+", metavar="FILE", help="measure nothing, write RESULTS.md")
    parser.add_argument("--page", type=Path, help="file to write instead of RESULTS.md")
    parser.add_argument("--needs", action="store_true", help="print the computed table of docs/scaling.md")
    return parser


if __name__ == "__main__":
    main()
