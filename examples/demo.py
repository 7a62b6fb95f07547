"""The main job on the trained mini-MoE of this repository: one recipe prunes and quantizes it.

Writes three checkpoints and prints what they cost beside the original: 4 bits only, pruned only, and both.
``make demo`` runs this and then lets vLLM generate from the last one (``examples/generate.py``).

    python examples/demo.py --output out/demo
"""

from __future__ import annotations

import argparse
import copy
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset
from llmcompressor import oneshot  # pyright: ignore[reportPrivateImportUsage] - the documented import
from tabulate import tabulate
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig, PreTrainedModel

import moe_coverage_plugin
from moe_coverage_plugin import Manifest, recipe_path
from moe_coverage_plugin.calibration.next_token import next_token_loss

MINI_MOE = Path(__file__).parents[1] / "benchmarks" / "testbed" / "mini_moe"
PRUNING = ("AttributionModifier", "CoverageModifier", "AlignmentModifier", "ChannelPruningModifier")


@dataclass(frozen=True)
class Result:
    """What one variant of the model costs and how well it predicts held-out text."""

    name: str
    bytes_on_disk: int
    channels: int
    loss: float


def windows(model_path: Path, file: str, count: int, length: int = 512) -> torch.Tensor:
    """``[count, length]`` token ids, evenly spread over a text that lies beside the model."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    ids = torch.tensor(tokenizer((model_path / file).read_text(encoding="utf-8"))["input_ids"])
    rows = ids[: len(ids) - len(ids) % length].reshape(-1, length)
    return rows[torch.linspace(0, len(rows) - 1, min(count, len(rows))).long()]


def expert_channels(model_path: Path) -> int:
    """Channels of all experts of an unpruned model whose layers are all mixtures."""
    config = AutoConfig.from_pretrained(model_path)
    return config.num_hidden_layers * config.num_experts * config.moe_intermediate_size


def recipe_of(name: str, prune: bool, quantize: bool) -> str:
    """A recipe of the package, with all of its modifiers or with one half of them."""
    recipe: dict[str, Any] = copy.deepcopy(yaml.safe_load(Path(recipe_path(name)).read_text()))
    modifiers = recipe["prune_stage"]["prune_modifiers"]
    kept = {key: value for key, value in modifiers.items() if (prune if key in PRUNING else quantize)}
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
        moe_calibrate_all_experts=False,  # scores count routed tokens only, and rounding needs no tokens at all
        output_dir=str(output),
    )


def open_model(path: Path) -> PreTrainedModel:
    """Any of the variants, in float32."""
    if Manifest.from_checkpoint(path) is not None:
        return moe_coverage_plugin.load(path, dtype=torch.float32)
    quantized = "quantization_config" in (path / "config.json").read_text()
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if quantized else {}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MINI_MOE, help="directory with calibration.txt and heldout.txt")
    parser.add_argument("--recipe", default="fisher_p25_q4", help="name of a recipe of the package")
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="emptied first")
    parser.add_argument("--calibration-windows", type=int, default=32)
    parser.add_argument("--heldout-windows", type=int, default=64)
    args = parser.parse_args()

    calibration = windows(args.model, "calibration.txt", args.calibration_windows)
    heldout = windows(args.model, "heldout.txt", args.heldout_windows)
    channels = expert_channels(args.model)

    shutil.rmtree(args.output, ignore_errors=True)
    results = [measure("original", args.model, channels, heldout)]
    variants = {
        "q4": ("4-bit only", False, True),
        "p": ("pruned only", True, False),
        "p_q4": ("pruned + 4-bit", True, True),
    }
    for folder, (name, prune, quantize) in variants.items():
        recipe = recipe_of(args.recipe, prune, quantize)
        compress(str(args.model), args.model, recipe, args.output / folder, calibration)
        results.append(measure(name, args.output / folder, channels, heldout))
    print(f"\n{args.recipe} on {args.model.name}: {len(heldout)} held-out windows of {heldout.shape[1]} tokens\n")
    print(table(results))


if __name__ == "__main__":
    main()
