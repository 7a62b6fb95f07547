"""The progress of a ``oneshot`` run, from which the same run goes on if it is killed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from compressed_tensors.distributed import is_distributed, is_source_process
from llmcompressor.entrypoints.oneshot import Oneshot
from llmcompressor.modifiers import Modifier
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.calibration_set import batches_hash
from moe_coverage_plugin.calibration.provenance import describe_model, environment, routers_hash
from moe_coverage_plugin.files.progress import Progress, progress_directory, remove_progress
from moe_coverage_plugin.modeling.compute_dtype import choose_compute_dtype
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.modifiers.oneshot_run import recipe_of, running_oneshot
from moe_coverage_plugin.modifiers.run_bar import close_bar

_progress: WeakKeyDictionary[Oneshot, Progress] = WeakKeyDictionary()


def run_progress(model: PreTrainedModel, batches: Sequence[Mapping[str, Any]]) -> Progress | None:
    """Return the progress of the run; ``None`` for one without an output directory, or with several ranks.

    Args:
        model: as the first pass of the run gets it.
        batches: of that pass.

    Raises:
        CoverageError: another run with this output is in progress.
    """
    run = running_oneshot()
    if run is None or run.output_dir is None or is_distributed():
        return None
    if run not in _progress:
        description = {
            **describe_model(model),
            "routers": routers_hash(find_moe_layers(model)),
            "calibration data": batches_hash(batches),
            "recipe": _described(recipe_of(run)),
            "compute dtype": str(choose_compute_dtype(model).dtype),
            "device": model.device.type,
            # not the seed, which differs in each process that sets none: it decides about the order of data only
            "versions": environment()["versions"],
        }
        _progress[run] = Progress(progress_directory(run.output_dir), "run", description)
    return _progress[run]


def end_progress_with_runs() -> None:
    """Let ``oneshot`` remove the progress of a run when its checkpoint is in its place."""
    call = Oneshot.__call__

    @wraps(call)
    def call_and_remove(self: Oneshot) -> None:
        try:
            call(self)
            if self.output_dir is not None and is_source_process():
                if self in _progress:
                    _progress[self].remove()
                # that of a run with another number of ranks, or of text only
                remove_progress(progress_directory(self.output_dir))
        finally:
            close_bar(self)
            if self in _progress:
                _progress.pop(self).close()

    # patch: progress-of-runs
    Oneshot.__call__ = call_and_remove


def _described(modifiers: Sequence[Modifier]) -> list[dict[str, Any]]:
    """Fields of all modifiers, and the content of score files that they read."""
    found = []
    for modifier in modifiers:
        fields = modifier.model_dump(exclude=set(Modifier.model_fields))
        if path := fields.get("scores"):
            fields["sha256 of scores"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        found.append({type(modifier).__name__: fields})
    return found
