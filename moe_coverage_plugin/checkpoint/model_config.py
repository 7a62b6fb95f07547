"""Reads the config of a pruned checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers import __version__ as version

from moe_coverage_plugin.expert_scheme import WIDTH_KEYS
from moe_coverage_plugin.files.headers import Tensors
from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest

# as safetensors names them
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def read_config(
    path: Path, manifest: Manifest, tensors: Tensors, trust_remote_code: bool
) -> tuple[PretrainedConfig, dict[str, Any] | None]:
    """Read the config of a checkpoint.

    Returns:
        The model's config as it was before pruning, and the ``quantization_config`` of the weights; ``None`` if
        nothing is quantized.

    Raises:
        CoverageError: the file does not describe a mixture of experts, or names code or a dtype that cannot be used.
    """
    file = path / "config.json"
    with convert_errors(file):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    config.__dict__.pop(CONFIG_KEY, None)
    config._experts_implementation = None  # it stops transformers at experts of unequal width
    quantization = config.__dict__.pop("quantization_config", None) or {}
    text_config = config.get_text_config()
    width_key = next((key for key in WIDTH_KEYS if hasattr(text_config, key)), None)
    if width_key is None or not isinstance(quantization, Mapping):
        raise CoverageError(f"{file} does not describe a mixture of experts: it is damaged, copy the checkpoint again")
    if not trust_remote_code and "/" in str(kernel := config._attn_implementation):
        # transformers downloads such a kernel from the hub and runs it
        raise CoverageError(
            f"{file} has attention computed by {kernel}, code from elsewhere: remove it from the file, or open the "
            "checkpoint with trust_remote_code=True"
        )
    # some files have the dtype of the language model only, and some none
    dtype = config.dtype or text_config.dtype or _stored_dtype(tensors)
    if not isinstance(dtype, torch.dtype):
        raise CoverageError(f"{file} has dtype {dtype!r}, which torch does not have: copy the checkpoint again")
    config.dtype = dtype
    setattr(text_config, width_key, manifest.intermediate_size)
    config._name_or_path = str(path)
    quantization = {key: value for key, value in quantization.items() if key not in (CONFIG_KEY, "quant_method")}
    has_schemes = quantization.get("config_groups") or quantization.get("kv_cache_scheme")
    return config, quantization if has_schemes else None


def _stored_dtype(tensors: Tensors) -> torch.dtype:
    """Return the dtype of most floating-point weights in the files, of those with more than one byte."""
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype in FLOATS:
            sizes[tensor.dtype] += tensor.elements
    return FLOATS[max(sizes, key=sizes.__getitem__)] if sizes else torch.float32


@contextmanager
def convert_errors(file: Path) -> Iterator[None]:
    """Turn any error of a toolkit that reads an untrusted file into a CoverageError."""
    try:
        yield
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise CoverageError(
            f"{file} describes nothing that transformers {version} can build ({cause}): follow that message, or copy "
            "the checkpoint again"
        ) from error
