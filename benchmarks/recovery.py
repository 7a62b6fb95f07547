r"""Measures how much of the loss of pruning a few minutes of fine-tuning recover, on unseen text.

Prunes a model by the recommended recipe, without quantization, on windows of the training texts; measures the unpruned
and the pruned model; fine-tunes for about the given time, which includes loading, evaluation and saving; and measures
the result. A few steps are timed first to compute the number of steps; --epochs limits it for small texts.

    python -m benchmarks.recovery --minutes 2          # the mini-MoE of this repository, on this machine
    python -m benchmarks.recovery --model testbed=DIR --train web=web.txt code=code.txt --evaluation wiki=wiki.txt \
        --minutes 10
    python -m benchmarks.recovery --render
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot  # pyright: ignore[reportPrivateImportUsage] - the documented import
from tabulate import tabulate
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.allocation.bench import mean_loss, open_linear
from benchmarks.allocation.tables import ALL_CORPORA
from benchmarks.allocation.text import WINDOW, Windows, calibration_pools, draw, evaluation_windows
from benchmarks.commands import portable
from benchmarks.plan import processor
from benchmarks.records import Record, measure_or_render, run_parser
from moe_coverage_plugin import RecoveryOptions, finetune, load, recommended_recipe
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.recovery import Recovered

RESULT = Path(__file__).with_name("results") / "recovery.json"
NAME = "recovery"
PACKAGES = ("moe-coverage-plugin", "llmcompressor", "compressed-tensors", "transformers", "peft", "torch")
BATCH = 8
# also the number of evaluations in the long run, so that both runs spend the same time on evaluation and saving
TIMED_STEPS = 8
# the loss curve uses every fourth window; evaluation on all would take longer than the steps of a short run
CURVE_SHARE = 4
# margin: fraction of the remaining time that is planned for steps
SHARE = 0.95


def prune(model_path: Path, output: Path, calibration: Windows, args: argparse.Namespace) -> None:
    """Prune by the recommended recipe without quantization."""
    torch.manual_seed(args.seed)
    rows = calibration.ids_WS.tolist()
    oneshot(
        model=open_linear(model_path, getattr(torch, args.dtype), args.device),
        tokenizer=AutoTokenizer.from_pretrained(model_path),
        recipe=recommended_recipe(args.sparsity, block_size=args.block_size, scheme=None),
        dataset=Dataset.from_dict({"input_ids": rows}),
        num_calibration_samples=len(rows),
        batch_size=BATCH,
        shuffle_calibration_samples=False,
        moe_calibrate_all_experts=False,
        sequential_offload_device=str(args.device),
        output_dir=str(output),
    )


def losses(model: PreTrainedModel, evaluation: dict[str, Windows], device: torch.device) -> dict[str, float]:
    """Mean next-token loss of every text, in nats."""
    model.to(device)  # pyright: ignore[reportArgumentType] - a wrapped method
    model.eval()
    return {name: mean_loss(model, windows.ids_WS) for name, windows in evaluation.items()}


def fitting_steps(probe: Recovered, wall_seconds: float, minutes: float) -> int:
    """Compute the number of steps that fit into a time, from a short run that evaluates and saves after each step.

    The time outside of steps is the same in the long run, see :func:`run_options`.
    """
    seconds = [point["seconds"] for point in probe.points if "seconds" in point]
    # the first steps also compile kernels and allocate memory
    per_step = statistics.median(seconds[len(seconds) // 2 :])
    outside = max(0.0, wall_seconds - sum(seconds))
    return max(1, math.floor(SHARE * (60 * minutes - outside) / per_step))


def run_options(args: argparse.Namespace, steps: int) -> RecoveryOptions:
    """Options of a run that evaluates and saves as often as the timed run, whatever its number of steps.

    Raises:
        CoverageError: if an option is unknown, or the benchmark sets it.
    """
    between = math.ceil(steps / TIMED_STEPS)
    own = {
        "sequence_length": WINDOW,
        "seed": args.seed,
        "steps": steps,
        "evaluate_every": between,
        "save_every": between,
    }
    if taken := sorted(own.keys() & args.option.keys()):
        raise CoverageError(f"option {taken[0]} is set by the benchmark: leave it out")
    return RecoveryOptions(**own, **args.option)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark; return figures, settings and versions."""
    probe_options = run_options(args, TIMED_STEPS)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(args.model[1])
    evaluation = evaluation_windows(args.evaluation, args.train, tokenizer, args.windows)
    pools = calibration_pools(args.train, tokenizer)
    calibration = draw(pools, ALL_CORPORA, args.calibration_windows, args.seed)
    text = Dataset.from_dict({"input_ids": torch.cat(list(pools.values())).tolist()})
    curve = Dataset.from_dict(
        {"input_ids": torch.cat([each.ids_WS[::CURVE_SHARE] for each in evaluation.values()]).tolist()}
    )
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        directory = Path(folder)
        prune(args.model[1], directory / "pruned", calibration, args)
        unpruned = AutoModelForCausalLM.from_pretrained(args.model[1], dtype=torch.float32)
        figures = {
            "unpruned": losses(unpruned, evaluation, args.device),
            "pruned": losses(load(directory / "pruned", torch.float32), evaluation, args.device),
        }
        del unpruned
        gc.collect()

        def run(output: Path, options: RecoveryOptions) -> tuple[Recovered, float]:
            teacher = args.model[1] if args.teach else None
            start = time.perf_counter()
            done = finetune(directory / "pruned", text, output, options, evaluation=curve, teacher=teacher)
            return done, time.perf_counter() - start

        steps = fitting_steps(*run(directory / "probe", probe_options), args.minutes)
        if args.epochs is not None:
            windows_per_step = probe_options.batch_size * probe_options.accumulation
            steps = min(steps, math.ceil(args.epochs * len(text) / windows_per_step))
        options = run_options(args, steps)
        done, seconds = run(directory / "recovered", options)
        figures["recovered"] = losses(load(directory / "recovered", torch.float32), evaluation, args.device)
    return {
        "model": args.model[0],
        "device": torch.cuda.get_device_name() if args.device.type == "cuda" else processor(),
        "command": portable("benchmarks.recovery", sys.argv[1:], {"--output", "--directory"}),
        "versions": {package: version(package) for package in PACKAGES},
        "seed": args.seed,
        "sparsity": args.sparsity,
        "block_size": args.block_size,
        "dtype": args.dtype,
        "calibration": calibration.description,
        "trained_on": {name: len(pool) for name, pool in pools.items()},
        "evaluation": [each.description for each in evaluation.values()],
        "teacher": args.teach,
        "options": options.model_dump(),
        "minutes_asked": args.minutes,
        "seconds": round(seconds, 1),
        "tokens": steps * options.batch_size * options.accumulation * WINDOW,
        "losses": figures,
        "recovered_share": recovered_share(figures),
        "curve_share": CURVE_SHARE,
        "curve": [point for point in done.points if "held_out" in point],
    }


def recovered_share(figures: dict[str, dict[str, float]]) -> float:
    """Recovered part of the rise of the mean loss over all texts; above 1 if better than the unpruned model."""
    unpruned, pruned, recovered = (statistics.mean(figures[k].values()) for k in ("unpruned", "pruned", "recovered"))
    return (pruned - recovered) / (pruned - unpruned)


def section(record: Record) -> str:
    """Markdown of a run."""
    options, figures = record["options"], record["losses"]
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    means = {name: statistics.mean(by_text.values()) for name, by_text in figures.items()}
    texts = list(figures["unpruned"])
    rows = [
        [name, *(f"{figures[name][text]:.4f}" for text in texts), f"{mean:.4f}", f"{mean - means['unpruned']:+.4f}"]
        for name, mean in means.items()
    ]
    table = tabulate(
        rows,
        ["model", *texts, "mean", "rise"],
        tablefmt="github",
        disable_numparse=True,
        colalign=("left", *["right"] * (len(texts) + 2)),
    )
    curve = ", ".join(f"{point['step']}: {point['held_out']:.4f}" for point in record["curve"])
    share = record["curve_share"]
    part = "all windows" if share == 1 else f"one window of {share}"
    lines = [
        f"### {record['model']}, {record['sparsity']:.0%} of the expert channels removed, trained on "
        + ("the unpruned model's logits" if record["teacher"] else "text alone"),
        "\n".join(
            (
                f"- Device: {record['device']}.",
                f"- Versions: {versions}.",
                f"- Command: `{record['command']}`",
                f"- Seed: {record['seed']}. Blocks of {record['block_size']}, weights in {record['dtype']}. Losses in "
                "float32, nats per token.",
                f"- Calibrated on {record['calibration']}.",
                f"- Trained on windows of {WINDOW} tokens: "
                + ", ".join(f"{name} ({count})" for name, count in record["trained_on"].items())
                + f"; {options['steps']} steps of {options['batch_size'] * options['accumulation']} windows, "
                f"{record['tokens'] / 1e6:.1f} M tokens, expert rate {options['expert_lr']:g}, router rate "
                f"{options['router_lr']:g}" + (", against the unpruned model's logits." if record["teacher"] else "."),
                f"- Measured on {'; '.join(record['evaluation'])}.",
                f"- Seconds for the whole fine-tuning: {record['seconds']:.0f} of {60 * record['minutes_asked']:.0f}.",
                f"- **{record['recovered_share']:.0%} of the rise of the mean loss are recovered.**",
            )
        ),
        table,
        f"Loss during training, on {part} of these texts, by step: {curve}.",
    ]
    return "\n\n".join(lines)


def _option(argument: str) -> tuple[str, Any]:
    name, separator, value = argument.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{argument!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    of_dtype = "of the pruned model and the recovered one"
    parser = run_parser("benchmarks.recovery", __doc__, "--train", RESULT, of_dtype)
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10.0, help="time of the fine-tuning")
    parser.add_argument("--epochs", type=float, help="largest number of passes over the text")
    parser.add_argument("--teach", action="store_true", help="learn the logits of the unpruned model")
    parser.add_argument(
        "--option",
        type=_option,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="fields of RecoveryOptions, for example expert_lr=1e-3",
    )
    args = parser.parse_args()
    args.option = dict(args.option)
    measure_or_render(args, NAME, "Recovery by fine-tuning", measure, section)


if __name__ == "__main__":
    main()
