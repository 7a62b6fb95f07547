"""Measures time and memory of scoring, on a random model with the shape of Qwen3-30B-A3B.

Runs ``oneshot`` four times on the same tokens: with a modifier that does nothing (the toolkit's own pass), with
scores in closed form, with scores from gradients (``fisher``), and with those of ``obs``. Prints tokens per second,
minutes for a calibration set of 3 M tokens, peak memory, and times relative to the first run. ``--json`` writes these
figures with the card and versions.

    PYTHONPATH=. python benchmarks/calibration.py --json benchmarks/calibration.json
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot  # pyright: ignore[reportPrivateImportUsage] - the documented import
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers import Modifier
from tabulate import tabulate
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from moe_coverage_plugin import AttributionModifier

# Qwen3-30B-A3B
FULL: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
}
SMALL: dict[str, Any] = FULL | {"hidden_size": 128, "num_hidden_layers": 2, "num_experts": 8, "vocab_size": 512}
LAYERS_AT_ONCE = 4
PACKAGES = ("moe-coverage-plugin", "llmcompressor", "transformers", "torch")


class NoOpModifier(Modifier):
    """Requires calibration data and does nothing, to measure the toolkit's own pass."""

    requires_calibration_data: bool = True

    def on_initialize(self, state: Any, **kwargs: Any) -> bool:  # noqa: ARG002 - the toolkit's signature
        return True


OWN_PASS = "toolkit's own pass"
MODIFIERS: dict[str, Callable[[], Modifier]] = {
    OWN_PASS: NoOpModifier,
    "closed form": lambda: AttributionModifier(channel_metric="activation"),
    "gradients": lambda: AttributionModifier(channel_metric="fisher"),
    "gradients and interactions": lambda: AttributionModifier(channel_metric="obs"),
}


@dataclass(frozen=True)
class Timing:
    """One run."""

    name: str
    layers: int
    tokens: int
    batch_tokens: int
    seconds: float
    peak_gib: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def random_model(shape: dict[str, Any], device: torch.device, directory: Path) -> PreTrainedModel:
    """Build a model with random weights and linear experts."""
    config = Qwen3MoeConfig(**shape)
    config.save_pretrained(directory)
    torch.manual_seed(0)
    model = _linear_model(config, device, min(LAYERS_AT_ONCE, config.num_hidden_layers))
    while (missing := config.num_hidden_layers - len(model.model.layers)) > 0:
        # linearizing needs twice the memory of the experts, so it is done for a few layers at a time
        model.model.layers.extend(_linear_model(config, device, min(LAYERS_AT_ONCE, missing)).model.layers)
    model.config = model.model.config = config
    model.config._name_or_path = str(directory)
    return model.eval()


def _linear_model(config: Qwen3MoeConfig, device: torch.device, layers: int) -> Any:
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = layers
    with device:
        model = AutoModelForCausalLM.from_config(shallow, dtype=torch.bfloat16)
    linearize_moe(model)
    return model


def measure(name: str, model: PreTrainedModel, ids_BS: torch.Tensor, batch_size: int) -> Timing:
    """Measure the wall-clock time of a complete ``oneshot``, including the data loader."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    oneshot(
        model=model,
        dataset=Dataset.from_dict({"input_ids": ids_BS.numpy()}),
        recipe=[MODIFIERS[name]()],
        num_calibration_samples=len(ids_BS),
        max_seq_length=ids_BS.shape[1],
        batch_size=batch_size,
        shuffle_calibration_samples=False,
        moe_calibrate_all_experts=False,
    )
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    layers = model.config.num_hidden_layers
    return Timing(name, layers, ids_BS.numel(), batch_size * ids_BS.shape[1], seconds, peak)


def table(timings: list[Timing], tokens: float) -> str:
    """Table of timings, with the minutes that ``tokens`` would take."""
    first = timings[0]
    rows = [
        (
            t.name,
            f"{t.tokens_per_second:,.0f}",
            f"{tokens / t.tokens_per_second / 60:.1f}",
            f"{t.peak_gib:.1f}",
            f"{first.tokens_per_second / t.tokens_per_second:.2f}",
        )
        for t in timings
    ]
    headers = ("run", "tokens/s", f"minutes for {tokens / 1e6:.0f} M tokens", "peak GiB", "time over the first")
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument(
        "--own-samples", type=int, default=32, help="samples of the toolkit's own pass, which is slower"
    )
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--small", action="store_true", help="use a tiny shape, for a trial")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    shape = dict(SMALL if args.small else FULL)
    if args.layers:
        shape["num_hidden_layers"] = args.layers
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    card = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU"
    with tempfile.TemporaryDirectory() as directory:
        model = random_model(shape, device, Path(directory))
        ids_BS = torch.randint(0, shape["vocab_size"], (args.samples, args.length))
        warm_up = ids_BS[: args.batch_size]
        timings = []
        for name in MODIFIERS:
            measure(name, model, warm_up, args.batch_size)
            samples = args.own_samples if name == OWN_PASS else args.samples
            timings.append(measure(name, model, ids_BS[:samples], args.batch_size))
    print(f"\n{card}, {shape['num_hidden_layers']} layers, {args.samples} x {args.length} tokens, seed 0\n")
    print(table(timings, tokens=3e6))
    if args.json:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "seed": 0,
            "card": card,
            "versions": {package: version(package) for package in PACKAGES},
            "shape": shape,
            "results": [asdict(timing) for timing in timings],
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
