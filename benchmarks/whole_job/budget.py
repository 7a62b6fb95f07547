"""A job on a budget of GPU memory, and its plan beside that of the job in memory."""

from __future__ import annotations

from pathlib import Path

import torch

from moe_coverage_plugin.core.ragged import kept_channels
from moe_coverage_plugin.files.scores import load_scores
from moe_coverage_plugin.manifest import SCORES_NAME, CoverageError, Manifest


def limit_gpu_memory(gib: float) -> None:
    """Let allocations of this process beyond a limit fail.

    Raises:
        CoverageError: there is no GPU, or it has less memory.
    """
    if not torch.cuda.is_available():
        raise CoverageError(f"--gpu-memory {gib:g} limits the memory of a GPU, and there is none: leave it out")
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if gib * 2**30 > total:
        raise CoverageError(f"--gpu-memory {gib:g} is more than the {total / 2**30:.1f} GiB of the GPU: choose less")
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)


def compare_plans(reference: Path, found: Path) -> dict[str, bool] | None:
    """Compare two checkpoints of one model: whether scores, widths and kept channels are equal, bit for bit.

    Args:
        reference: checkpoint of the job in memory.
        found: checkpoint of the job on a budget.

    Returns:
        ``None`` if there is no reference.
    """
    if not (reference / "config.json").is_file():
        return None
    scores, widths, kept = [], [], []
    for checkpoint in (reference, found):
        manifest = Manifest.from_checkpoint(checkpoint)
        assert manifest is not None
        measured, _ = load_scores(str(checkpoint / SCORES_NAME))
        scores.append(measured.channels_LEI)
        widths.append(torch.tensor([list(manifest.widths[name]) for name in measured.names]))
        kept.append(kept_channels(measured.channels_LEI, widths[-1]))
    equal_kept = widths[0].equal(widths[1]) and all(
        one.equal(other) for pair in zip(*kept, strict=True) for one, other in zip(*pair, strict=True)
    )
    return {"scores": scores[0].equal(scores[1]), "widths": widths[0].equal(widths[1]), "kept channels": equal_kept}
