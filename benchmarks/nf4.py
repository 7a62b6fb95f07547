"""Compares NF4 of bitsandbytes with W4A16: loss, bytes and speed in transformers, and the effect of aligned widths.

Prunes a model by the recommended recipe and by the paper's, to exact widths and to blocks of 64, and opens the results
in 16 bit, in NF4, and from a checkpoint in W4A16, which is decompressed. In all variants, experts are linear layers in
the toolkit's container, because transformers stores the experts of a layer in one tensor, which bitsandbytes does not
quantize. Speeds are measured in rounds, each with all variants.

    python -m benchmarks.nf4                       # the mini-MoE of this repository, on this machine
    python -m benchmarks.nf4 --model testbed=DIR --calibration web=web.txt code=code.txt --evaluation wiki=wiki.txt
    python -m benchmarks.nf4 --render
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tabulate import tabulate
from torch import Tensor
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.allocation.bench import Bench, mean_loss, open_linear
from benchmarks.allocation.recipes import BLOCKS, HAMILTON, PAPER, UNIFORM, Recipe, channels, recommended
from benchmarks.allocation.sizes import BYTES_PER_NUMBER
from benchmarks.allocation.tables import ALL_CORPORA, Setting
from benchmarks.allocation.text import calibration_pools, draw, evaluation_windows
from benchmarks.commands import portable
from benchmarks.plan import processor
from benchmarks.records import Record, measure_or_render, run_parser
from moe_coverage_plugin import load
from moe_coverage_plugin.modeling.moe_layers import expert_linears, find_moe_layers

RESULT = Path(__file__).with_name("results") / "nf4.json"
NAME = "nf4"
PACKAGES = (
    *("moe-coverage-plugin", "llmcompressor", "compressed-tensors", "transformers"),
    *("bitsandbytes", "accelerate", "torch"),
)
NF4_BLOCK = 64
SCALE_BYTES = 4
NF4_BYTES = 0.5 + SCALE_BYTES / NF4_BLOCK
"""Bytes per number, without double quantization."""

PROMPT = 32

PRUNINGS: dict[tuple[str, str], Callable[[float], Recipe]] = {
    ("unpruned", "all"): lambda _p: channels(0.0, UNIFORM, BLOCKS),
    ("recommended", "exact"): lambda p: recommended(p, None),
    ("recommended", "64"): lambda p: recommended(p),
    ("paper", "exact"): lambda p: channels(p, PAPER),
    ("paper", "64"): lambda p: channels(p, PAPER, HAMILTON),
}
WEIGHTS = ("16 bit", "NF4", "NF4, scales in 8 bit", "W4A16")


@dataclass(frozen=True)
class Variant:
    """A pruned model and the format of its weights."""

    method: str
    widths: str
    weights: str

    @property
    def bits(self) -> int:
        """Bits of the checkpoint; NF4 is made from one in 16 bit."""
        return 4 if self.weights == "W4A16" else 16

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint's directory."""
        return f"{self.method}-{self.widths}-{self.bits}"

    def open(self, directory: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
        """Open the model to compute in ``dtype``."""
        config = None
        if self.weights.startswith("NF4"):
            config = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=dtype,
                bnb_4bit_use_double_quant="8 bit" in self.weights,
            )
        model = load(directory / self.checkpoint, dtype, quantization_config=config)
        return model.to(device)  # pyright: ignore[reportArgumentType] - a wrapped method


def variants() -> list[Variant]:
    """List all rows, without W4A16 for exact widths, which are not multiples of its groups."""
    return [
        Variant(method, widths, weights)
        for method, widths in PRUNINGS
        for weights in WEIGHTS
        if not (widths == "exact" and weights == "W4A16") and not (method == "paper" and "8 bit" in weights)
    ]


def write_checkpoints(bench: Bench, args: argparse.Namespace, directory: Path, calibration: Any) -> None:
    """Write a checkpoint of each pruning in 16 bit and, if widths are aligned, in W4A16."""
    written: set[str] = set()
    for variant in variants():
        if variant.checkpoint in written:
            continue
        written.add(variant.checkpoint)
        recipe = PRUNINGS[variant.method, variant.widths](args.sparsity)
        torch.manual_seed(args.seed)
        setting = Setting(NAME, variant.checkpoint, variant.method, args.sparsity, recipe, variant.bits)
        bench.compress(setting, calibration).save_pretrained(directory / variant.checkpoint)


def stored_expert_bytes(checkpoint: Path) -> int:
    """Return the bytes of experts in the files; a floating-point number counts 2 bytes, whatever its dtype."""
    total = 0
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            tensors = (shard.get_tensor(name) for name in shard.keys() if ".experts." in name)  # noqa: SIM118
            total += sum(t.numel() * BYTES_PER_NUMBER if t.is_floating_point() else t.nbytes for t in tensors)
    return total


def held_expert_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of experts in memory, counted as in the files; in NF4 with scales and tables."""
    held: dict[int, int] = {}
    for layer in find_moe_layers(model):
        for linear in expert_linears(layer):
            for tensor in linear.parameters():
                state = getattr(tensor, "quant_state", None)
                if state is None:
                    held[tensor.data_ptr()] = tensor.numel() * BYTES_PER_NUMBER
                else:
                    held |= {each.data_ptr(): each.nbytes for each in (tensor, *_state_tensors(state))}
    return sum(held.values())


def _state_tensors(state: Any) -> Iterable[Tensor]:
    nested = (state.offset, state.state2.absmax, state.state2.code) if state.nested else ()
    return (state.absmax, state.code, *nested)


def padding(model: PreTrainedModel) -> dict[str, float]:
    """Compute the bytes of padding to blocks of 64 numbers in NF4, with scales of 4 bytes.

    Returns:
        ``bytes`` of the experts without padding, and bytes of padding: ``held`` in bitsandbytes, whose blocks continue
        in the next row; ``by_rows`` if each row began a new block; ``by_channels`` if each expert were padded to a
        multiple of 64 channels. ``aligned`` is the share of kept experts whose width is a multiple of 64.
    """
    numbers, held, by_rows, by_channels, widths = 0, 0, 0, 0, []
    for layer in find_moe_layers(model):
        widths += [width for width in layer.widths if width]
        for linear in expert_linears(layer):
            rows, columns = linear.out_features, linear.in_features
            numbers += rows * columns
            held += _missing(rows * columns)
            by_rows += rows * _missing(columns)
            # the other dimension is the hidden size, a multiple of 64
            by_channels += rows * _missing(columns) + columns * _missing(rows)
    return {
        "bytes": numbers * NF4_BYTES,
        "held": held * NF4_BYTES,
        "by_rows": by_rows * NF4_BYTES,
        "by_channels": by_channels * NF4_BYTES,
        "aligned": statistics.mean(width % NF4_BLOCK == 0 for width in widths),
    }


def _missing(count: int) -> int:
    """Return how many numbers the last block lacks."""
    return -count % NF4_BLOCK


def seconds_of(run: Callable[[PreTrainedModel], object], model: PreTrainedModel) -> float:
    """Return the seconds of one run, until the device has finished."""
    _finish()
    start = time.perf_counter()
    run(model)
    _finish()
    return time.perf_counter() - start


def _finish() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@torch.inference_mode()
def _forward(model: PreTrainedModel, ids_BS: Tensor) -> None:
    model(input_ids=ids_BS, use_cache=False)


def _decode(model: PreTrainedModel, ids_S: Tensor, tokens: int) -> None:
    length: dict[str, Any] = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    model.generate(  # pyright: ignore[reportCallIssue]
        input_ids=ids_S[None], attention_mask=torch.ones_like(ids_S)[None], do_sample=False, use_cache=True, **length
    )


def measure_speeds(models: list[PreTrainedModel], ids_WS: Tensor, args: argparse.Namespace) -> list[dict[str, float]]:
    """Measure tokens per second of each model, and the ratio to the first model (median of the ratios per round)."""
    ids_BS = ids_WS[: args.batch_size].to(args.device)
    runs: dict[str, tuple[Callable[[PreTrainedModel], object], int]] = {
        "forward": (lambda model: _forward(model, ids_BS), ids_BS.numel()),
        "decode": (lambda model: _decode(model, ids_BS[0, :PROMPT], args.new_tokens), args.new_tokens),
    }
    measured: list[dict[str, float]] = [{} for _ in models]
    for name, (run, tokens) in runs.items():
        for model in models:
            # warm-up, which compiles kernels
            run(model)
        rounds = [[seconds_of(run, model) for model in models] for _ in range(args.rounds)]
        for index, figures in enumerate(measured):
            figures[name] = tokens / statistics.median(seconds[index] for seconds in rounds)
            figures[f"{name}_ratio"] = statistics.median(seconds[0] / seconds[index] for seconds in rounds)
    return measured


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark; return figures, settings and versions."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(args.model[1])
    evaluation = evaluation_windows(args.evaluation, args.calibration, tokenizer, args.windows)
    calibration = draw(
        calibration_pools(args.calibration, tokenizer), ALL_CORPORA, args.calibration_windows, args.seed
    )
    ids_WS = torch.cat([each.ids_WS for each in evaluation.values()])
    dtype = getattr(torch, args.dtype)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        directory = Path(folder)
        pristine = open_linear(args.model[1], torch.float32, args.device)
        bench = Bench(pristine, tokenizer, evaluation, args.device, directory)
        write_checkpoints(bench, args, directory, calibration)
        del bench, pristine
        for variant in variants():
            model = variant.open(directory, torch.float32, args.device)
            losses = {name: mean_loss(model, windows.ids_WS) for name, windows in evaluation.items()}
            rows.append(
                {
                    "method": variant.method,
                    "widths": variant.widths,
                    "weights": variant.weights,
                    "losses": losses,
                    "channels": sum(sum(layer.widths) for layer in find_moe_layers(model)),
                    "stored_expert_bytes": stored_expert_bytes(directory / variant.checkpoint),
                    "held_expert_bytes": held_expert_bytes(model),
                    "padding": padding(model),
                }
            )
            print(f"{variant.method}, {variant.widths}, {variant.weights}: {statistics.mean(losses.values()):.4f}")
            del model
            gc.collect()
        models = [variant.open(directory, dtype, args.device) for variant in variants()]
        for row, figures in zip(rows, measure_speeds(models, ids_WS, args), strict=True):
            row["tokens_per_second"] = figures
    cuda = args.device.type == "cuda"
    return {
        "model": args.model[0],
        "device": torch.cuda.get_device_name() if cuda else f"{processor()}, threads: {torch.get_num_threads()}",
        "command": portable("benchmarks.nf4", sys.argv[1:], {"--output", "--directory"}),
        "versions": {package: version(package) for package in PACKAGES},
        "seed": args.seed,
        "sparsity": args.sparsity,
        "dtype": args.dtype,
        "calibration": calibration.description,
        "evaluation": [each.description for each in evaluation.values()],
        "batch": [len(ids_WS[: args.batch_size]), ids_WS.shape[1]],
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "rows": rows,
    }


def section(record: Record) -> str:
    """Markdown of a run."""
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    windows, length = record["batch"]
    lines = [
        f"### {record['model']}, {record['sparsity']:.0%} of the expert channels removed",
        "\n".join(
            (
                f"- Device: {record['device']}.",
                f"- Versions: {versions}.",
                f"- Command: `{record['command']}`",
                f"- Seed: {record['seed']}. Losses in float32, nats per token; speeds in {record['dtype']}.",
                f"- Calibrated on {record['calibration']}.",
                f"- Measured on {'; '.join(record['evaluation'])}.",
                f"- Forward: {windows} windows of {length} tokens at once. Decode: {record['new_tokens']} tokens of "
                f"one sequence, greedy. Medians of {record['rounds']} rounds; in brackets: ratio to the first row.",
            )
        ),
        _results_table(record["rows"]),
        "Padding of experts in NF4 to blocks of 64 numbers, as a share of their bytes:",
        _padding_table(record["rows"]),
    ]
    return "\n\n".join(lines)


def _results_table(rows: list[dict[str, Any]]) -> str:
    base = statistics.mean(rows[0]["losses"].values())
    table = []
    for row in rows:
        loss, speed = statistics.mean(row["losses"].values()), row["tokens_per_second"]
        table.append(
            [
                f"{row['method']}, {row['widths']}",
                row["weights"],
                f"{loss:.4f}",
                f"{loss - base:+.4f}",
                f"{row['stored_expert_bytes'] / 1e6:.2f}",
                f"{row['held_expert_bytes'] / 1e6:.2f}",
                *(f"{speed[name]:,.0f} ({speed[f'{name}_ratio']:.2f})" for name in ("forward", "decode")),
            ]
        )
    headers = [
        *("pruned, widths", "weights", "loss", "rise", "experts on disk, MB", "in memory, MB"),
        *("forward, tokens/s", "decode, tokens/s"),
    ]
    aligned = ("left", "left", *["right"] * (len(headers) - 2))
    return tabulate(table, headers, tablefmt="github", disable_numparse=True, colalign=aligned)


def _padding_table(rows: list[dict[str, Any]]) -> str:
    table = []
    for row in rows:
        if row["weights"] == "NF4":
            pads = row["padding"]
            shares = (f"{pads[name] / pads['bytes']:.2%}" for name in ("held", "by_rows", "by_channels"))
            table.append(
                [f"{row['method']}, {row['widths']}", f"{row['channels']:,}", f"{pads['aligned']:.0%}", *shares]
            )
    headers = [
        *("pruned, widths", "channels", "experts of aligned width", "bitsandbytes"),
        *("if each row began a block", "if experts were padded to blocks"),
    ]
    aligned = ("left", *["right"] * (len(headers) - 1))
    return tabulate(table, headers, tablefmt="github", disable_numparse=True, colalign=aligned)


def main() -> None:
    parser = run_parser("benchmarks.nf4", __doc__, "--calibration", RESULT, "to measure speed in")
    parser.add_argument("--sparsity", type=float, default=0.25)
    parser.add_argument("--batch-size", type=int, default=8, help="windows of a forward pass, for speed")
    parser.add_argument("--new-tokens", type=int, default=32, help="decoded tokens, for speed")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    measure_or_render(args, NAME, "NF4 by bitsandbytes", measure, section)


if __name__ == "__main__":
    main()
