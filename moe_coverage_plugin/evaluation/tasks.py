"""Finds tasks of lm-eval by name, and builds them with their data before a model is opened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_coverage_plugin.evaluation.local_tasks import LocalTask
from moe_coverage_plugin.evaluation.task_names import check_names, unknown_task
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import EvaluationOptions


@dataclass(frozen=True)
class Unit:
    """A task, or a group with all of its tasks, which is run and stored as one.

    Attributes:
        name: name of the task or group.
        spec: object of lm-eval.
        identity: hash of prompts, scoring and local data.
    """

    name: str
    spec: Any
    identity: str


class Tasks:
    """Tasks that can be run here.

    The task files of lm-eval itself are read only if a name is not found elsewhere, because there are thousands.

    Args:
        include: directories of task files in lm-eval's YAML format.

    Raises:
        CoverageError: a path is not a directory.
    """

    def __init__(self, include: Sequence[str | Path] = ()) -> None:
        from lm_eval.tasks import TaskManager

        for directory in include:
            if not Path(directory).is_dir():
                raise CoverageError(f"{directory} is not a directory: give one with task files for lm-eval")
        self._include: list[str | Path] = [*include]
        self.manager = TaskManager(include_path=self._include, include_defaults=False)

    def units(self, names: Iterable[str], local: Sequence[LocalTask], options: EvaluationOptions) -> list[Unit]:
        """Build tasks and read their data; data sets on the hub are downloaded.

        Args:
            names: tasks, groups or tags.
            local: tasks from JSON lines.
            options: the options that tasks will be run with.

        Raises:
            CoverageError: a name is unknown or given twice, or a task cannot be built, or not be run with the options.
        """
        configs = {task.name: task.config() for task in local}
        given = [*names, *(task.name for task in local)]
        if repeated := sorted({name for name in given if given.count(name) > 1}):
            raise CoverageError(f"two tasks are called {repeated[0]}: leave one out, or rename the file")
        self._check_known(names := list(names))
        units = [unit for name in names for unit in self._build(name, name)]
        units += [unit for name, config in configs.items() for unit in self._build(name, config)]
        for unit in units:
            _check_runnable(unit, options)
        return units

    def _check_known(self, names: Sequence[str]) -> None:
        from lm_eval.tasks import TaskManager

        if elsewhere := set(names) - set(self.manager.all_tasks):
            check_names(elsewhere)
            self.manager = TaskManager(include_path=self._include)
        for name in names:
            if name not in self.manager.all_tasks:
                raise unknown_task(name, self.manager.all_tasks)

    def _build(self, name: str, spec: str | dict[str, Any]) -> Iterator[Unit]:
        try:
            loaded = self.manager.load([spec])
        except Exception as error:
            # task files can run any code, and their data can be anywhere
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise CoverageError(f"the task {name} cannot be built ({reason})") from error
        tasks, groups = loaded["tasks"], loaded.get("groups", {})
        # a tag is replaced by its tasks, because it has no results of its own
        found = {name: groups.get(name) or tasks.get(name)} if name in groups or name in tasks else tasks
        for unit, built in found.items():
            yield Unit(unit, built, _identity(_leaves(built)))


def _leaves(spec: Any) -> list[Any]:
    return list(spec.get_all_tasks()) if hasattr(spec, "get_all_tasks") else [spec]


def _check_runnable(unit: Unit, options: EvaluationOptions) -> None:
    for task in _leaves(unit.spec):
        if getattr(task, "UNSAFE_CODE", False) and not options.run_unsafe_code:
            raise CoverageError(f"{unit.name} runs programs that the model writes: add --run-unsafe-code in a sandbox")
        # lm-eval would ignore the number without a message
        if options.few_shot and task.get_config("num_fewshot") == 0:
            raise CoverageError(f"{unit.name} is fixed at 0 examples: leave out --few-shot, or run it separately")


def _identity(tasks: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        config = task.dump_config()
        files = _local_files((config.pop("dataset_kwargs", None) or {}).get("data_files"))
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        for file in files:
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _local_files(data_files: Any) -> list[Path]:
    if isinstance(data_files, Mapping):
        return [file for _, each in sorted(data_files.items()) for file in _local_files(each)]
    if isinstance(data_files, list):
        return [file for each in data_files for file in _local_files(each)]
    return [Path(data_files)] if isinstance(data_files, str) and Path(data_files).is_file() else []
