"""Compares ways to shrink the mini-MoE at equal bytes: ours, one width for all experts, and whole experts by REAP.

Every row is compressed by a recipe, saved, opened again and measured on held-out text. Prints a Markdown table and,
with ``--json``, writes the figures with versions, command and seed.

    PYTHONPATH=. python benchmarks/equal_bytes.py --json benchmarks/equal_bytes.json
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import shlex
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from tabulate import tabulate
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.demo import MINI_MOE, Result, compress, expert_channels, measure, windows
from moe_coverage_plugin.calibration.causal_mask import keep_causal_mask

Modifiers = dict[str, dict[str, Any]]
PACKAGES = ("moe-coverage-plugin", "llmcompressor", "transformers", "torch")


def ours(sparsity: float, block_size: int | None, layout: str = "ragged") -> Modifiers:
    """The paper's method with its defaults."""
    modifiers: Modifiers = {"AttributionModifier": {}, "CoverageModifier": {"sparsity": sparsity}}
    if block_size is not None:
        modifiers["AlignmentModifier"] = {"block_size": block_size, "min_width": block_size}
    return modifiers | {"ChannelPruningModifier": {"layout": layout}}


def inside_layers(sparsity: float, block_size: int) -> Modifiers:
    """Coverage over the experts of each layer only, by the exact loss of removing an expert; layers share equally."""
    modifiers = ours(sparsity, block_size)
    modifiers["AttributionModifier"] = {"expert_importance": "second_order", "layer_noise": None}
    modifiers["CoverageModifier"] |= {"inter_layer": "uniform"}
    return modifiers


def one_width(sparsity: float) -> Modifiers:
    """Every expert loses the same number of channels, those of least activation."""
    strategies = {"inter_layer": "uniform", "intra_layer": "uniform"}
    return {
        "AttributionModifier": {"layer_noise": None},
        "CoverageModifier": {"sparsity": sparsity} | strategies,
        "ChannelPruningModifier": {"layout": "uniform"},
    }


def four_bits(group_size: int) -> Modifiers:
    """Round to nearest, symmetric, in groups."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"QuantizationModifier": {"config_groups": groups, "ignore": ["lm_head"]}}


def settings() -> dict[str, Modifiers]:
    """Rows of the table by name; those of one sparsity have about equal bytes."""
    reap: dict[float, Modifiers] = {p: {"REAPPruningModifier": {"sparsity": p}} for p in (0.25, 0.5)}
    return {
        "4 bits": four_bits(64),
        "25 % paper, a=128": ours(0.25, 128),
        "25 % paper, a=64": ours(0.25, 64),
        "25 % inside layers, exact ALA, a=64": inside_layers(0.25, 64),
        "25 % one width for all": one_width(0.25),
        "25 % REAP, whole experts": reap[0.25],
        "25 % paper, a=64 + 4 bits": ours(0.25, 64) | four_bits(64),
        "25 % inside layers, exact ALA, a=64 + 4 bits": inside_layers(0.25, 64) | four_bits(64),
        "25 % REAP, whole experts + 4 bits": reap[0.25] | four_bits(64),
        "50 % paper, no alignment": ours(0.5, None),
        "50 % inside layers, exact ALA, a=64": inside_layers(0.5, 64),
        "50 % one width for all": one_width(0.5),
        "50 % REAP, whole experts": reap[0.5],
    }


def open_causal(path: Path) -> PreTrainedModel:
    """The model as the toolkit should see it: without our modifiers it would calibrate REAP with attention ahead."""
    model = AutoModelForCausalLM.from_pretrained(path)
    keep_causal_mask(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MINI_MOE, help="directory with calibration.txt and heldout.txt")
    parser.add_argument("--calibration-windows", type=int, default=32)
    parser.add_argument("--heldout-windows", type=int, default=112)
    parser.add_argument("--rows", default="", help="measure only rows whose name this regular expression finds")
    parser.add_argument("--json", type=Path, help="write the rows; those of other names that it holds stay")
    args = parser.parse_args()

    torch.manual_seed(0)
    calibration = windows(args.model, "calibration.txt", args.calibration_windows)
    heldout = windows(args.model, "heldout.txt", args.heldout_windows)
    channels = expert_channels(args.model)
    results = [measure("original", args.model, channels, heldout)]
    chosen = {name: modifiers for name, modifiers in settings().items() if re.search(args.rows, name)}
    for name, modifiers in chosen.items():
        recipe = yaml.safe_dump({"prune_stage": {"prune_modifiers": modifiers}}, sort_keys=False)
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "model"
            compress(open_causal(args.model), args.model, recipe, output, calibration)
            results.append(measure(name, output, channels, heldout))
    if args.json and args.json.exists():
        measured = {result.name: result for result in results}
        known = {row["name"]: Result(**row) for row in json.loads(args.json.read_text())["results"]}
        results = list((known | measured).values())
    print(markdown(results))
    if args.json:
        args.json.write_text(json.dumps(record(results), indent=1) + "\n")


def markdown(results: list[Result]) -> str:
    """Bytes, loss and its rise over the original."""
    first = results[0]
    rows = [
        (
            r.name,
            f"{r.bytes_on_disk / 1e6:.2f}",
            f"{r.loss:.4f}",
            f"{r.loss - first.loss:+.4f}",
            f"{math.exp(r.loss):.3f}",
        )
        for r in results
    ]
    headers = ("model", "MB on disk", "held-out loss", "rise", "perplexity")
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True, colalign=("left", *["right"] * 4))


def record(results: list[Result]) -> dict[str, Any]:
    """The figures with what is needed to repeat them."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "seed": 0,
        "machine": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "versions": {package: version(package) for package in PACKAGES},
        "results": [asdict(result) for result in results],
    }


if __name__ == "__main__":
    main()
