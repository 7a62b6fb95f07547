"""Checks that no rank would get a part of a quantization group, in the user's process.

vLLM finds the same when it builds the layer, in another process, whose errors reach the user as "see root cause
above", or, in some releases, at the first request. Ragged experts always fit: ranks are assigned entire groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_coverage_plugin.files.split_layers import EXPERTS, evenly_split_layers
from moe_coverage_plugin.manifest import CoverageError, Manifest
from moe_coverage_plugin.parallelism import heads_obstacle
from moe_coverage_plugin.serving.local_files import LocalFiles


def check_degrees(
    manifest: Manifest,
    quantization: Mapping[str, Any],
    files: LocalFiles | None,
    ranks: int,
    expert_ranks: int,
    any_expert_ranks: bool,
) -> None:
    """Check that the numbers of ranks divide the layers of a checkpoint into entire quantization groups.

    Args:
        manifest: of the checkpoint.
        quantization: ``quantization_config`` of the checkpoint.
        files: of the checkpoint; ``None`` if it is not local, and then only experts of one width are checked.
        ranks: number of ranks that share each linear layer.
        expert_ranks: number of ranks that share each expert.
        any_expert_ranks: whether our method serves the experts, which any number of ranks may share.

    Raises:
        CoverageError: a layer does not fit; the message names the first one.
    """
    if files is not None:
        _check_heads(files.config, ranks)
    tensors = files.tensors if files is not None else {}
    for layer in evenly_split_layers(tensors, quantization, manifest, any_expert_ranks):
        degree = expert_ranks if layer.kind == EXPERTS else ranks
        _raise(layer.as_split(layer.name).obstacle(degree), degree)


def _check_heads(config: Mapping[str, Any], ranks: int) -> None:
    text_config = config.get("text_config") or config
    heads = text_config.get("num_key_value_heads")
    # latent attention has no such heads
    if type(heads) is int and heads > 0 and text_config.get("kv_lora_rank") is None:
        _raise(heads_obstacle(heads, ranks), ranks)


def _raise(obstacle: str | None, ranks: int) -> None:
    if obstacle is not None:
        raise CoverageError(
            f"{ranks} ranks do not fit the checkpoint: {obstacle}; serve with a --tensor-parallel-size that "
            "moe-coverage inspect lists for it, or quantize with smaller groups"
        )
