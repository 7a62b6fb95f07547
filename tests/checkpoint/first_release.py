"""Turns a checkpoint into one that the first release would have written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from moe_coverage_plugin.manifest import CHECKSUM_KEY, CONFIG_KEY, REPORT_NAME, SCORES_NAME, checksum
from tests.files.forged import forge, to_version_1

FIRST_SCORES_NAME = "moe_coverage_scores.bin"


def as_first_release(checkpoint: Path, copy: Path) -> Path:
    """Copy a checkpoint with the names of the first release in its entry, its report and its scores.

    Args:
        checkpoint: has its entry in the ``quantization_config``.
        copy: directory to create.
    """
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    entry = config["quantization_config"][CONFIG_KEY]
    entry["dead_experts"] = entry.pop("removed_experts")
    del entry["contents"], entry["tokens"]
    entry[CHECKSUM_KEY] = checksum(entry)
    (copy / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    report = json.loads((copy / REPORT_NAME).read_text())
    report = {"blocks": report.pop("layers")} | report
    report["plan"]["dropped_by_alignment"] = report["plan"].pop("removed_by_alignment")
    (copy / REPORT_NAME).write_text(json.dumps(report, indent=1))
    forge(copy / FIRST_SCORES_NAME, copy / SCORES_NAME, to_version_1)
    shutil.rmtree((copy / SCORES_NAME).parent)
    return copy
