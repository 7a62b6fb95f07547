"""Checks of a fine-tuning: arguments before the model is opened, the model before it is trained."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.text import Text, check_files
from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest
from moe_coverage_plugin.modeling.nf4 import check_config
from moe_coverage_plugin.options import RecoveryOptions
from moe_coverage_plugin.recovery.source import is_quantized, nf4_config
from moe_coverage_plugin.recovery.teacher import check_teacher


def check_arguments(
    checkpoint: Path, text: Text, evaluation: Text | None, teacher: str | Path | None, options: RecoveryOptions
) -> None:
    """Check the arguments of a fine-tuning, by config files only.

    Raises:
        CoverageError: not a pruned checkpoint, files of text that do not exist, or a teacher or options that do not
            fit.
    """
    if not (checkpoint / "config.json").is_file() or (manifest := Manifest.from_checkpoint(checkpoint)) is None:
        raise CoverageError(
            f"{checkpoint} is not a pruned checkpoint ({CONFIG_KEY} is not in its config.json): prune the model first"
        )
    if manifest.layout == "padded":
        raise CoverageError(
            f"{checkpoint} has layout 'padded', and training would change its zero channels: fine-tune a checkpoint "
            "of layout 'ragged' or 'uniform'"
        )
    if options.nf4:
        check_config(nf4_config(checkpoint, options), checkpoint, is_quantized(checkpoint))
        if options.mode == "router":
            raise CoverageError("mode='router' trains no expert, but nf4 rounds all of them: leave nf4 out")
    for each in (text, evaluation):
        if each is not None:
            check_files(each)
    if options.mode == "router" and teacher is None:
        raise CoverageError("mode='router' learns the logits of the unpruned model: give that model as teacher")
    if teacher is not None:
        check_teacher(teacher)


def check_model(model: PreTrainedModel, options: RecoveryOptions) -> None:
    """Check that a model can be trained with the options.

    Raises:
        CoverageError: it cannot.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and options.sequence_length > longest:
        raise CoverageError(
            f"sequence_length={options.sequence_length} of fine-tuning exceeds the model's {longest} positions: give "
            f"at most {longest}"
        )
    if model.dtype == torch.float16:
        raise CoverageError(
            "the checkpoint is in float16, where gradients of single tokens underflow: fine-tune it with "
            "dtype='bfloat16'"
        )
    if options.checkpointing and not model.supports_gradient_checkpointing:
        raise CoverageError(
            f"{type(model).__name__} does not support gradient checkpointing: leave out checkpointing, and reduce "
            "batch_size if memory is short"
        )
