"""Reads the checkpoint to fine-tune, as far as this needs no model, and the text for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from loguru import logger
from transformers import AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerBase

from moe_coverage_plugin.calibration.text import Text, Windows, pack, split
from moe_coverage_plugin.files.tokenizer import has_tokenizer
from moe_coverage_plugin.manifest import CoverageError, read_json
from moe_coverage_plugin.options import RecoveryOptions

# matches from the beginning of the name of any module except projections of experts
NO_EXPERT = r"(?!.*\.experts\.\d+\.)"


@dataclass(frozen=True)
class Source:
    """A pruned checkpoint and the text for it.

    Attributes:
        path: directory of the checkpoint.
        quantized: whether its weights are quantized.
        tokenizer: ``None`` if there is none, which token ids do not need.
        train: windows to train on.
        held_out: windows for the held-out loss.
    """

    path: Path
    quantized: bool
    tokenizer: PreTrainedTokenizerBase | None
    train: Windows
    held_out: Windows


def read_source(
    checkpoint: Path,
    text: Text,
    evaluation: Text | None,
    field: str,
    tokenizer: str | Path | None,
    options: RecoveryOptions,
) -> Source:
    """Read the text and the tokenizer.

    Raises:
        CoverageError: a tokenizer or text that cannot be read, or too little text.
    """
    opened = _open_tokenizer(Path(tokenizer) if tokenizer is not None else checkpoint)
    train = pack(text, opened, field, options.sequence_length)
    if evaluation is None:
        train, held_out = split(train, options.held_out)
    else:
        held_out = pack(evaluation, opened, field, options.sequence_length)
    quantized = is_quantized(checkpoint)
    if quantized:
        logger.info(
            f"{checkpoint} is quantized: its weights are decompressed and frozen, and the result is a 16-bit "
            "checkpoint, to be quantized again"
        )
    return Source(checkpoint, quantized, opened, train, held_out)


def is_quantized(checkpoint: Path) -> bool:
    """Return whether the weights of a checkpoint are quantized."""
    return bool((read_json(checkpoint / "config.json").get("quantization_config") or {}).get("config_groups"))


def nf4_config(checkpoint: Path, options: RecoveryOptions) -> BitsAndBytesConfig:
    """Return a config that opens experts in NF4, which compute in the dtype of the other weights."""
    dtype = options.dtype or read_json(checkpoint / "config.json").get("dtype")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=getattr(torch, str(dtype), None),
        llm_int8_skip_modules=[NO_EXPERT],
    )


def _open_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    if not has_tokenizer(directory):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CoverageError(f"the tokenizer of {directory} cannot be opened ({error}): give another one") from error
