"""The main job on the trained mini-MoE of this repository: one recipe prunes and quantizes it.

Writes three checkpoints (4 bits only, pruned only, and both) and prints a table of their sizes and losses. The second
pruned one takes its scores from the first. ``make demo`` runs this and then generates from the last checkpoint with
vLLM (``examples/generate.py``).

    python examples/demo.py --output out/demo
"""

from __future__ import annotations

import argparse
import copy
import logging
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from llmcompressor import oneshot  # pyright: ignore[reportPrivateImportUsage] - the documented import
from loguru import logger
from tabulate import tabulate
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

import moe_coverage_plugin
from moe_coverage_plugin import Manifest, recipe_path
from moe_coverage_plugin.calibration.next_token import next_token_loss
from moe_coverage_plugin.manifest import SCORES_NAME

MINI_MOE = Path(__file__).parents[1] / "benchmarks" / "testbed" / "mini_moe"
PRUNING = ("AttributionModifier", "CoverageModifier", "AlignmentModifier", "ChannelPruningModifier")


@dataclass(frozen=True)
class Result:
    """The size of one variant of the model, and its loss on held-out text."""

    name: str
    bytes_on_disk: int
    channels: int
    loss: float


def windows(model_path: Path, file: str, count: int, length: int = 512) -> torch.Tensor:
    """``[count, length]`` token ids, evenly spread over a text in the directory of the model."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    ids = torch.tensor(tokenizer((model_path / file).read_text(encoding="utf-8"))["input_ids"])
    rows = ids[: len(ids) - len(ids) % length].reshape(-1, length)
    return rows[torch.linspace(0, len(rows) - 1, min(count, len(rows))).long()]


def expert_channels(model_path: Path) -> int:
    """Channels of all experts of an unpruned model whose layers are all MoE layers."""
    config = AutoConfig.from_pretrained(model_path)
    return config.num_hidden_layers * config.num_experts * config.moe_intermediate_size


def recipe_of(name: str, prune: bool, quantize: bool, scores: Path | None = None) -> str:
    """A recipe of the package, with all of its modifiers or only those that prune or quantize.

    Args:
        scores: file of an earlier run on the same model, to be used instead of measuring again.
    """
    recipe: dict[str, Any] = copy.deepcopy(yaml.safe_load(Path(recipe_path(name)).read_text()))
    modifiers = recipe["prune_stage"]["prune_modifiers"]
    kept = {key: value for key, value in modifiers.items() if (prune if key in PRUNING else quantize)}
    if scores is not None:
        kept["AttributionModifier"]["scores"] = str(scores)
    return yaml.safe_dump({"prune_stage": {"prune_modifiers": kept}}, sort_keys=False)


def compress(
    model: str | PreTrainedModel, tokenizer: Path, recipe: str, output: Path, calibration: torch.Tensor
) -> None:
    """Run one recipe on the calibration windows."""
    oneshot(
        model=model,
        tokenizer=str(tokenizer),
        dataset=Dataset.from_dict({"input_ids": calibration.tolist()}),
        recipe=recipe,
        num_calibration_samples=len(calibration),
        batch_size=8,
        moe_calibrate_all_experts=False,  # scores count routed tokens only, and W4A16 rounding needs no data
        output_dir=str(output),
    )


def open_model(path: Path) -> PreTrainedModel:
    """Open any of the variants in float32."""
    if Manifest.from_checkpoint(path) is not None:
        return moe_coverage_plugin.load(path, dtype=torch.float32)
    quantized = "quantization_config" in (path / "config.json").read_text()
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if quantized else {}
    # dequantized weights have the dtype of their scales, bfloat16
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).float()


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, heldout: torch.Tensor, desc: str) -> float:
    """Mean next-token loss inside the windows, nats."""
    total, tokens = 0.0, 0
    for rows in tqdm(heldout.split(8), desc=f"Held-out loss, {desc}"):
        loss, count = next_token_loss(model, {"input_ids": rows})
        total, tokens = total + float(loss), tokens + count
    return total / tokens


def measure(name: str, path: Path, all_channels: int, heldout: torch.Tensor) -> Result:
    """Size and loss of a saved variant."""
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    manifest = Manifest.from_checkpoint(path)
    channels = all_channels if manifest is None else sum(map(sum, manifest.widths.values()))
    return Result(name, size, channels, held_out_loss(open_model(path), heldout, name))


def table(results: list[Result]) -> str:
    """The results as a table; sizes and channels relative to the first row."""
    first = results[0]
    rows = [
        (
            result.name,
            f"{result.bytes_on_disk / 2**20:.2f}",
            f"{result.bytes_on_disk / first.bytes_on_disk:.1%}",
            f"{result.channels} ({result.channels / first.channels:.0%})",
            f"{result.loss:.4f}",
            f"{math.exp(result.loss):.3f}",
        )
        for result in results
    ]
    headers = ("model", "weights, MiB", "of original", "expert channels", "held-out loss", "perplexity")
    return tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 5))


def log_to(path: Path) -> None:
    """Write the messages of all libraries to a file, and only those of this package to the screen as well."""
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    logging.basicConfig(filename=path, level=logging.INFO, force=True)
    logging.captureWarnings(True)
    # llm-compressor and this package log through loguru
    logger.remove()
    logger.add(path, level="INFO")
    logger.add(tqdm.write, level="INFO", format="{message}", filter="moe_coverage_plugin", colorize=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MINI_MOE, help="directory with calibration.txt and heldout.txt")
    parser.add_argument("--recipe", default="fisher_p25_q4", help="name of a recipe of the package")
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="emptied first")
    parser.add_argument("--calibration-windows", type=int, default=32)
    parser.add_argument("--heldout-windows", type=int, default=64)
    args = parser.parse_args()

    shutil.rmtree(args.output, ignore_errors=True)
    args.output.mkdir(parents=True)
    log_to(args.output / "demo.log")
    print(f"Messages of the libraries are written to {args.output / 'demo.log'}")

    calibration = windows(args.model, "calibration.txt", args.calibration_windows)
    heldout = windows(args.model, "heldout.txt", args.heldout_windows)
    channels = expert_channels(args.model)
    pruned = args.output / "p"
    variants = {
        "4-bit only": (args.output / "q4", recipe_of(args.recipe, prune=False, quantize=True)),
        "pruned only": (pruned, recipe_of(args.recipe, prune=True, quantize=False)),
        "pruned + 4-bit": (
            args.output / "p_q4",
            recipe_of(args.recipe, prune=True, quantize=True, scores=pruned / SCORES_NAME),
        ),
    }
    results = [measure("original", args.model, channels, heldout)]
    for name, (output, recipe) in variants.items():
        print(f"\n--- {name}: {output}")
        compress(str(args.model), args.model, recipe, output, calibration)
        results.append(measure(name, output, channels, heldout))
    print(f"\n{args.recipe} on {args.model.name}: {len(heldout)} held-out windows of {heldout.shape[1]} tokens\n")
    print(table(results))


if __name__ == "__main__":
    main()
