"""The result of a fine-tuning, and the record of it in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.provenance import environment
from moe_coverage_plugin.checkpoint.model_card import TRAINED_KEY
from moe_coverage_plugin.checkpoint.saving import record_of
from moe_coverage_plugin.files.scores import copy_scores
from moe_coverage_plugin.options import RecoveryOptions
from moe_coverage_plugin.recovery.curve import CURVE_NAME, Point, draw_points, write_points
from moe_coverage_plugin.recovery.ranks import Ranks
from moe_coverage_plugin.recovery.source import Source


@dataclass(frozen=True)
class Recovered:
    """The result of a fine-tuning.

    Attributes:
        before: mean next-token loss on the held-out text of the checkpoint that was read, in nats.
        after: the same of the checkpoint that was written.
        points: loss curve, equal to the file in the checkpoint.
        writes: whether this process is the rank that wrote it.
    """

    before: float
    after: float
    points: list[Point]
    writes: bool

    @property
    def steps(self) -> int:
        """Steps of the optimizer."""
        return self.points[-1]["step"]


def record_training(
    model: PreTrainedModel,
    recovered: Recovered,
    source: Source,
    options: RecoveryOptions,
    teacher: str | Path | None,
    ranks: Ranks,
) -> None:
    """Let ``model.save_pretrained`` write provenance and curve of the fine-tuning, and the source's scores."""
    entry = {
        "text": source.train.source,
        "text_windows": len(source.train.ids_WS),
        "text_sha256": source.train.sha256,
        "evaluation": source.held_out.source,
        "evaluation_sha256": source.held_out.sha256,
        "teacher": None if teacher is None else str(teacher),
        "trained_on": _frozen_weights(source, options),
        "ranks": ranks.count,
        "steps": recovered.steps,
        "held_out_loss": [recovered.before, recovered.after],
        "options": options.model_dump(),
        "versions": environment()["versions"] | {"peft": version("peft")},
    }
    record = record_of(model)
    # lists, because a model can be fine-tuned several times
    record.report[TRAINED_KEY] = [*record.report.get(TRAINED_KEY, []), entry | {"curve": CURVE_NAME}]
    record.provenance[TRAINED_KEY] = [*record.provenance.get(TRAINED_KEY, []), entry]

    def write(directory: Path) -> None:
        write_points(directory, recovered.points)
        draw_points(directory, recovered.points)
        copy_scores(source.path, directory)
        if source.tokenizer is not None:
            source.tokenizer.save_pretrained(directory)

    record.companions.append(write)


def _frozen_weights(source: Source, options: RecoveryOptions) -> str:
    if source.quantized:
        return "decompressed quantized weights"
    return "16-bit weights, those of experts rounded to NF4" if options.nf4 else "16-bit weights"
