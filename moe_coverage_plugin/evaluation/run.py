"""Runs tasks on a checkpoint one after the other, and stores the results of each as soon as it is finished."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_coverage_plugin.evaluation import backends
from moe_coverage_plugin.evaluation.local_tasks import LocalTask
from moe_coverage_plugin.evaluation.results import Results
from moe_coverage_plugin.evaluation.task_names import check_names
from moe_coverage_plugin.evaluation.tasks import Tasks, Unit
from moe_coverage_plugin.files.atomic import check_place
from moe_coverage_plugin.files.model_path import check_model
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import EvaluationOptions


def evaluate(
    checkpoint: str,
    tasks: Sequence[str],
    output: str | Path,
    options: EvaluationOptions | None = None,
    local: Sequence[LocalTask] = (),
    include: Sequence[str | Path] = (),
) -> Results:
    """Evaluate a checkpoint, pruned or not.

    Tasks that have results in ``output`` are not run again. If all have, no model is opened.

    Args:
        checkpoint: directory of a model, or its name on the hub.
        tasks: names of tasks, groups or tags of lm-eval.
        output: JSON file of the results.
        options: how to run the tasks.
        local: tasks from JSON lines.
        include: directories of further task files for lm-eval.

    Returns:
        All results in ``output``.

    Raises:
        CoverageError: a package is not installed, a task is unknown or cannot be built, or the file cannot be written
            or has results of another checkpoint or with other settings; all are found before a model is opened.
    """
    options = options or EvaluationOptions()
    output = Path(output)
    backends.check_installed(options.backend)
    if not tasks and not local:
        raise CoverageError("no task is given: name tasks of lm-eval, or give files of JSON lines")
    check_model(checkpoint)
    check_place(output)
    if not include:
        check_names(tasks)
    backends.check_lm_eval()
    directory = _directory(checkpoint)
    results = _earlier(output, Results.of(checkpoint, directory))
    backends.check_tokenizer(Path(options.tokenizer or directory))
    available = Tasks(include)
    dtype = backends.dtype_of(directory, options)
    settings = {"backend": options.backend, "dtype": dtype, "limit": options.limit, "seed": options.seed}
    settings |= {"few_shot": options.few_shot}
    units = [(unit, settings | {"identity": unit.identity}) for unit in available.units(tasks, local, options)]
    left = [(unit, own) for unit, own in units if not results.is_done(unit.name, own)]
    if not left:
        return results
    model = backends.open_backend(directory, dtype, options)
    rest: dict[str, Any] = {"versions": backends.versions(options.backend), "model_args": dict(options.model_args)}
    for unit, own in left:
        began = time.monotonic()
        found = _run(unit, model, available.manager, options)
        rest["seconds"] = round(time.monotonic() - began, 2)
        results.add(unit.name, own, found, rest)
        results.write(output)
    return results


def _directory(checkpoint: str) -> Path:
    if (directory := Path(checkpoint)).is_dir():
        return directory
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(checkpoint, ignore_patterns=["*.bin", "*.pth", "*.pt", "*.gguf", "original/*"]))
    except Exception as error:
        # an invalid name, no network, no access: each has a type of its own
        reason = " ".join(str(error).split())[:160]
        raise CoverageError(
            f"{checkpoint} is not a model directory or hub name ({reason}): give the directory of a model, or "
            "OWNER/NAME of one on the hub"
        ) from error


def _earlier(output: Path, fresh: Results) -> Results:
    if not output.exists():
        return fresh
    results = Results.read(output)
    if results.fingerprint != fresh.fingerprint:
        raise CoverageError(
            f"{output} has results of another checkpoint, {results.checkpoint}, or of {fresh.checkpoint} before it "
            "changed: choose another file"
        )
    return results


def _run(unit: Unit, model: Any, manager: Any, options: EvaluationOptions) -> Any:
    from lm_eval.evaluator import simple_evaluate

    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    return simple_evaluate(
        model=model,
        tasks=[unit.spec],
        task_manager=manager,
        num_fewshot=options.few_shot,
        limit=options.limit,
        log_samples=False,
        confirm_run_unsafe_code=options.run_unsafe_code,
        **dict.fromkeys(seeds, options.seed),
    )
