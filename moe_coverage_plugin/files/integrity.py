"""The one check of a checkpoint's files that every reader calls first: ``load``, ``moe-coverage inspect`` and vLLM.

Reads headers, scales and small tensors, but no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_coverage_plugin.files.expert_tensors import find_experts, names_of
from moe_coverage_plugin.files.expert_widths import check_expert_names, check_expert_shapes
from moe_coverage_plugin.files.headers import Tensors, read_headers
from moe_coverage_plugin.files.mtp import is_mtp_name, mtp_layers
from moe_coverage_plugin.files.quantization import check_quantization
from moe_coverage_plugin.files.record import NEGATIVE_KEY, check_record
from moe_coverage_plugin.files.storage import check_storage, modules_of
from moe_coverage_plugin.files.structure import check_others, check_sizes
from moe_coverage_plugin.files.values import Values, check_values, read_shapes
from moe_coverage_plugin.manifest import CoverageError, Manifest, read_json

RECIPE_NAME = "recipe.yaml"
# of the quantizers that compressed checkpoints of release 0.1 can have, the one whose scales have a sign
SIGNED_QUANTIZER = "AutoRoundModifier"


def check_checkpoint(
    directory: Path, manifest: Manifest, config: Mapping[str, Any] | None = None, tensors: Tensors | None = None
) -> Tensors:
    """Check that config, manifest and weight files of a local checkpoint belong together and are complete.

    Checkpoints of release 0.1 have no record of their contents. Their experts, scales and the shapes that follow from
    the config are checked as all others, but a missing tensor outside the experts is found only where other tensors
    need it.

    Args:
        directory: the checkpoint.
        manifest: its manifest.
        config: its ``config.json``, if the caller has read it.
        tensors: headers of all its weight files, if the caller has read them.

    Returns:
        The headers of all tensors, except those of layers that predict several tokens, which no reader loads.

    Raises:
        CoverageError: a file or a tensor is missing, left over, damaged or of another checkpoint; the message names
            the first one.
    """
    file = directory / "config.json"
    if config is None:
        config = read_json(file)
    text_config = config.get("text_config") or config
    quantization = config.get("quantization_config") or {}
    check_quantization(quantization)
    if not isinstance(text_config, Mapping):
        raise CoverageError(f"{file} is damaged (text_config is not an object): copy the checkpoint again")
    check_sizes(text_config, manifest)
    if tensors is None:
        tensors = read_headers(directory)
    if mtp_layers(config):
        # engines pass over such layers in models that have them, and some tools copy them from the source of a model
        tensors = {name: tensor for name, tensor in tensors.items() if not is_mtp_name(name, config)}
    experts = find_experts(tensors, manifest)
    modules, values = modules_of(tensors), Values()
    unpacked = read_shapes(modules, values)
    # names of experts first, because their message says what a difference means
    check_expert_names(experts, manifest)
    check_storage(modules, unpacked, quantization)
    check_expert_shapes(tensors, experts, manifest, modules, unpacked)
    in_experts = names_of(experts)
    check_others(tensors, in_experts, modules, text_config, manifest)
    check_record(tensors, config, manifest)
    check_values(tensors, in_experts, manifest, _may_be_negative(directory, manifest), values)
    return tensors


def _may_be_negative(directory: Path, manifest: Manifest) -> bool:
    """Return whether scales were negative when they were written."""
    if manifest.contents:
        return manifest.contents.get(NEGATIVE_KEY) is True
    try:
        return SIGNED_QUANTIZER in (directory / RECIPE_NAME).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
