"""Checks that no rank would get a part of a quantization group, in the user's process.

vLLM finds the same when it builds the layer, in another process, whose errors reach the user as "see root cause
above", or, in some releases, at the first request. Ragged experts always fit: ranks are assigned entire groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_coverage_plugin.files.headers import read_headers
from moe_coverage_plugin.files.split_layers import EXPERTS, split_layers
from moe_coverage_plugin.files.weights import SUFFIX
from moe_coverage_plugin.manifest import CoverageError, Manifest, read_json
from moe_coverage_plugin.parallelism import SplitLayer, heads_obstacle


def check_degrees(
    directory: Path,
    manifest: Manifest,
    quantization: Mapping[str, Any],
    ranks: int,
    expert_ranks: int,
    any_expert_ranks: bool,
) -> None:
    """Check that the numbers of ranks divide the layers of a local checkpoint into entire quantization groups.

    Args:
        directory: of the checkpoint; one that is not local is not checked.
        manifest: of the checkpoint.
        quantization: ``quantization_config`` of the checkpoint.
        ranks: number of ranks that share each linear layer.
        expert_ranks: number of ranks that share each expert.
        any_expert_ranks: whether our method serves the experts, which any number of ranks may share.

    Raises:
        CoverageError: a layer does not fit; the message names the first one.
    """
    if manifest.layout != "ragged":
        _check(SplitLayer("experts", manifest.declared_width), expert_ranks)
    if not any(directory.glob(f"*{SUFFIX}")):
        return
    _check_heads(read_json(directory / "config.json"), ranks)
    for layer in split_layers(read_headers(directory), quantization):
        if layer.kind != EXPERTS:
            _check(layer.as_split(layer.name), ranks)
        elif manifest.layout != "ragged" and not any_expert_ranks:
            _check(layer.as_split(layer.name), expert_ranks)


def _check_heads(config: Mapping[str, Any], ranks: int) -> None:
    text_config = config.get("text_config") or config
    heads = text_config.get("num_key_value_heads")
    # latent attention has no such heads
    if type(heads) is int and heads > 0 and text_config.get("kv_lora_rank") is None:
        _raise(heads_obstacle(heads, ranks), ranks)


def _check(layer: SplitLayer, ranks: int) -> None:
    _raise(layer.obstacle(ranks), ranks)


def _raise(obstacle: str | None, ranks: int) -> None:
    if obstacle is not None:
        raise CoverageError(
            f"{ranks} ranks do not fit the checkpoint: {obstacle}; serve with a --tensor-parallel-size that "
            "moe-coverage inspect lists for it, or quantize with smaller groups"
        )
