"""Opens the teacher: the unpruned model whose logits a pruned one learns."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_coverage_plugin.manifest import CoverageError, Manifest


def check_teacher(directory: str | Path) -> None:
    """Check that a directory has an unpruned model.

    Raises:
        CoverageError: it does not.
    """
    if not (Path(directory) / "config.json").is_file():
        raise CoverageError(f"teacher {directory} is not a checkpoint: give the directory of the unpruned model")
    if Manifest.from_checkpoint(directory) is not None:
        raise CoverageError(f"teacher {directory} is pruned itself: give the directory of the unpruned model")


def open_teacher(
    directory: str | Path, model: PreTrainedModel, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """Open the teacher of a model, frozen and in the same dtype.

    Raises:
        CoverageError: it cannot be opened, or has another vocabulary.
    """
    try:
        teacher = AutoModelForCausalLM.from_pretrained(
            directory, dtype=model.dtype, trust_remote_code=trust_remote_code
        ).eval()
    except (OSError, ValueError, KeyError) as error:
        raise CoverageError(f"teacher {directory} cannot be opened ({error}): give the unpruned model") from error
    sizes = [each.config.get_text_config().vocab_size for each in (teacher, model)]
    if sizes[0] != sizes[1]:
        raise CoverageError(
            f"teacher {directory} has a vocabulary of {sizes[0]} and the pruned model one of {sizes[1]}: give the "
            "model that was pruned"
        )
    teacher.requires_grad_(False)
    return teacher.to(device)  # pyright: ignore[reportArgumentType] - a wrapped method
