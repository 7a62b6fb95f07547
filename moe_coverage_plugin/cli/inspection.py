"""``moe-coverage inspect``: contents of a pruned checkpoint, and the tensor-parallel degrees that it allows."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_coverage_plugin.cli import output
from moe_coverage_plugin.cli.checkpoint import Checkpoint, read_checkpoint
from moe_coverage_plugin.cli.expert_ranks import HEADERS as BALANCE_HEADERS
from moe_coverage_plugin.cli.expert_ranks import balance_rows, rank_balance
from moe_coverage_plugin.expert_scheme import ExpertScheme, describe_numbers
from moe_coverage_plugin.files.split_layers import evenly_split_layers
from moe_coverage_plugin.parallelism import ParallelShape, degrees, imbalance

HEADERS = (
    *("layer", "channels", "kept", "coverage", "experts", "removed", "narrowest", "mean", "widest"),
    *("fewest tokens", "most tokens", "without tokens"),
)
SHOWN_IMBALANCE = 0.0005
MOST_BARS = 16
BAR_LENGTH = 40


def run(arguments: Namespace) -> None:
    """Print a summary of a checkpoint, and write it to files if they are given.

    Raises:
        CoverageError: not a pruned checkpoint, or a damaged one.
    """
    checkpoint = read_checkpoint(Path(arguments.checkpoint))
    summary = _summary(checkpoint)
    _show(summary)
    if arguments.json is not None:
        output.write_json(arguments.json, summary)
    if arguments.pictures is not None:
        from moe_coverage_plugin.cli.checkpoint_view import checkpoint_view

        facts = _facts(summary)
        output.write_pictures(checkpoint_view(checkpoint, facts), arguments.pictures)


def _summary(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    shape = _parallel_shape(checkpoint)
    obstacles = degrees(shape)
    with_entire_experts = degrees(shape, expert_parallel=True)
    legal = [degree for degree, found in obstacles.items() if not found]
    on_cpus = degrees(_parallel_shape(checkpoint, any_expert_ranks=bool(checkpoint.groups)))
    return {
        "checkpoint": str(checkpoint.directory),
        "layout": manifest.layout,
        "intermediate_size": manifest.intermediate_size,
        "block_size": manifest.block_size,
        "dtype": checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype")),
        "quantization": [_quantization(group) for group in checkpoint.groups],
        "bytes": {
            "experts": checkpoint.expert_bytes,
            "other": checkpoint.other_bytes,
            "experts_unpruned_16_bit": checkpoint.unpruned_bytes,
        },
        "layers": [_layer(checkpoint, name, widths) for name, widths in manifest.widths.items()],
        "tensor_parallel": {
            "legal": legal,
            "imbalance": {str(degree): _imbalance(checkpoint, degree) for degree in legal},
            "legal_on_cpus_only": [each for each, found in on_cpus.items() if not found and each not in legal],
            "blocked": {str(degree): found for degree, found in obstacles.items() if found},
        },
        "expert_parallel": {
            "legal": [degree for degree, found in with_entire_experts.items() if not found],
            "balance": rank_balance(checkpoint),
        },
        "provenance": manifest.provenance,
        "remarks": checkpoint.remarks,
    }


def _parallel_shape(checkpoint: Checkpoint, any_expert_ranks: bool = False) -> ParallelShape:
    """Return the sizes that decide on the tensor-parallel degrees of a checkpoint.

    Args:
        checkpoint: the checkpoint.
        any_expert_ranks: whether our method serves quantized experts of one width, too, as in builds for CPUs.

    Raises:
        CoverageError: a number is absent in the config, or a packed weight has no scales.
    """
    latent = checkpoint.config.get("kv_lora_rank") is not None
    has_own = checkpoint.config.get("num_key_value_heads") is not None
    found = evenly_split_layers(checkpoint.tensors, checkpoint.quantization, checkpoint.manifest, any_expert_ranks)
    layers = {layer.as_split(layer.kind) for layer in found}
    return ParallelShape(
        attention_heads=checkpoint.size("num_attention_heads"),
        key_value_heads=None if latent else checkpoint.size(f"num_{'key_value' if has_own else 'attention'}_heads"),
        experts=max(len(widths) for widths in checkpoint.manifest.widths.values()),
        vocabulary=checkpoint.size("vocab_size"),
        layers=tuple(sorted(layers, key=lambda layer: (layer.what, layer.channels, layer.group_size or 0))),
    )


def _quantization(group: Mapping[str, Any]) -> dict[str, Any]:
    inputs = group.get("input_activations")
    # in a damaged file, it can be anything
    return {**group["weights"], "input_activations": dict(inputs) if isinstance(inputs, Mapping) else None}


def _imbalance(checkpoint: Checkpoint, degree: int) -> float:
    """Return the fraction by which the largest share of expert channels exceeds the mean share of a rank."""
    stored = [(weights.get("num_bits", 4), weights.get("group_size")) for weights in checkpoint.weight_groups]
    schemes = [ExpertScheme(bits, group) for bits, group in stored if group is None or group > 0]
    unit = max((scheme.shard_unit for scheme in schemes), default=ExpertScheme().shard_unit)
    return imbalance(checkpoint.manifest.widths.values(), unit, degree)


def _layer(checkpoint: Checkpoint, name: str, widths: list[int]) -> dict[str, Any]:
    report = checkpoint.report.get(name, {})
    return {
        "name": name,
        "kept": sum(widths),
        "keep_ratio": sum(widths) / (len(widths) * checkpoint.manifest.intermediate_size),
        "coverage": report.get("coverage"),
        "removed": [expert for expert, width in enumerate(widths) if width == 0],
        "widths": widths,
        "tokens": report.get("tokens"),
    }


def _facts(summary: dict[str, Any]) -> dict[str, str]:
    layers, sizes = summary["layers"], summary["bytes"]
    widths = [width for layer in layers for width in layer["widths"]]
    channels = len(widths) * summary["intermediate_size"]
    stored = sizes["experts"] + sizes["other"]
    return {
        "checkpoint": summary["checkpoint"],
        "layout": f"{summary['layout']}, widths in blocks of {summary['block_size']}, {summary['intermediate_size']} "
        "channels before pruning",
        "weights": ", ".join(map(_scheme, summary["quantization"])) or f"not quantized ({summary['dtype']})",
        "channels": f"{sum(widths):,} of {channels:,} kept ({output.percent(sum(widths) / channels)})",
        "experts": f"{len(widths) - widths.count(0)} of {len(widths)} kept, {widths.count(0)} removed"
        + _without_tokens(layers),
        "on disk": f"{output.mebibytes(stored)}: experts {output.mebibytes(sizes['experts'])}, other tensors "
        f"{output.mebibytes(sizes['other'])}",
        "unpruned": f"the experts would take {output.mebibytes(sizes['experts_unpruned_16_bit'])} in 16 bit",
        **output.provenance_facts(summary["provenance"]),
    }


def _scheme(weights: dict[str, Any]) -> str:
    inputs = weights.get("input_activations")
    return describe_numbers(weights) + ("" if inputs is None else f" (activations {describe_numbers(inputs)})")


def _without_tokens(layers: list[dict[str, Any]]) -> str:
    counts = [layer["tokens"].count(0) for layer in layers if layer["tokens"] is not None]
    return f", {sum(counts)} without calibration tokens" if counts else ""


def _show(summary: dict[str, Any]) -> None:
    print(output.fact_lines(_facts(summary)))
    for remark in summary["remarks"]:
        print(f"note: {remark}")
    print(f"\n{output.table(HEADERS, [_row(layer) for layer in summary['layers']])}")
    widths = [width for layer in summary["layers"] for width in layer["widths"]]
    print(f"\n{output.table(('width', 'experts', ''), list(_histogram(widths, summary['intermediate_size'])))}")
    parallel = summary["tensor_parallel"]
    print(f"\ntensor parallel in vLLM: {', '.join(map(_degree, parallel['imbalance'].items()))}")
    if on_cpus := parallel["legal_on_cpus_only"]:
        print(f"  in builds of vLLM for CPUs also {', '.join(map(str, on_cpus))}")
    print(output.fact_lines({f"  not {degree}": _first(found) for degree, found in parallel["blocked"].items()}))
    of_experts = summary["expert_parallel"]
    print(f"tensor parallel with --enable-expert-parallel: {', '.join(map(str, of_experts['legal']))}")
    if of_experts["balance"]:
        print(f"\n{output.table(BALANCE_HEADERS, balance_rows(of_experts['balance']))}")


def _degree(item: tuple[str, float]) -> str:
    degree, excess = item
    return degree if excess < SHOWN_IMBALANCE else f"{degree} (largest rank +{excess:.1%})"


def _first(obstacles: list[str]) -> str:
    first, *others = obstacles
    return f"{first} (and {len(others)} more)" if others else first


def _row(layer: dict[str, Any]) -> tuple[object, ...]:
    widths, tokens = layer["widths"], layer["tokens"]
    kept = [width for width in widths if width]
    return (
        output.layer_label(layer["name"]),
        layer["kept"],
        output.percent(layer["keep_ratio"]),
        output.percent(layer["coverage"]),
        len(kept),
        len(layer["removed"]),
        min(kept, default="-"),
        f"{layer['kept'] / len(widths):.0f}",
        max(kept, default="-"),
        *(("-", "-", "-") if tokens is None else (min(tokens), max(tokens), tokens.count(0))),
    )


def _histogram(widths: list[int], intermediate_size: int) -> Iterable[tuple[str, int, str]]:
    """Yield rows of a width, or of a range if there are many widths, its number of experts, and a bar."""
    step = 1 if len(set(widths)) <= MOST_BARS else -(-intermediate_size // MOST_BARS)
    # removed experts have a row of their own
    counts = Counter(-(-width // step) for width in widths)
    for bin_, count in sorted(counts.items()):
        first, last = (bin_ - 1) * step + 1, min(bin_ * step, intermediate_size)
        label = str(last) if step == 1 or bin_ == 0 else f"{first}-{last}"
        bar = "#" * max(1, round(BAR_LENGTH * count / max(counts.values())))
        yield label, count, bar.ljust(BAR_LENGTH)
