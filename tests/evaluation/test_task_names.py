"""Names of tasks are checked by the text of lm-eval's files, as its own index would.

Field case 2.20: an unknown task was an error only after the index was built, which takes ten seconds and more.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper_protocol import TASKS
from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.evaluation import backends, evaluate
from moe_coverage_plugin.evaluation.task_names import check_names, defined_names, occurs
from moe_coverage_plugin.evaluation.tasks import Tasks
from moe_coverage_plugin.options import EvaluationOptions

pytestmark = pytest.mark.slow

UNKNOWN = {
    "nosuch": "lm-eval has no task 'nosuch'",
    "arc_esy": "similar names are arc_easy",
    "arc_eas": "similar names are arc_easy",
    "arc_easy,piqa": "lm-eval has no task 'arc_easy,piqa', similar names are arc_easy",
    "mmlu_*": "similar names are mmlu",
    "": "lm-eval has no task ''",
}


@pytest.fixture(scope="module")
def folder() -> Path:
    spec = find_spec("lm_eval")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0], "tasks")


@pytest.fixture(scope="module")
def folders(folder: Path) -> list[Path]:
    """Those of the tasks of the paper, and a sixth of the others."""
    ours = {protocol.task for protocol in TASKS.values()}
    # the folder benchmarks groups tasks of others
    every = sorted(path for path in folder.iterdir() if path.is_dir() and path.name != "benchmarks")
    return [path for number, path in enumerate(every) if number % 6 == 0 or ours & set(defined_names(path))]


@pytest.fixture(scope="module")
def index(folders: list[Path]) -> Any:
    """lm-eval's index of these tasks, which takes long to build; files that tasks include are parsed once."""
    from lm_eval.tasks import TaskManager, _yaml_loader

    load_yaml = _yaml_loader.load_yaml
    included = cache(lambda path: load_yaml(path, resolve_func=False))
    with pytest.MonkeyPatch.context() as patch:
        # patch: tests-included-tasks
        patch.setattr(_yaml_loader, "load_yaml", lambda path, **_options: dict(included(path)))
        return TaskManager(include_path=folders, include_defaults=False)


def test_every_name_of_the_index_is_found(folders: list[Path], index: Any) -> None:
    """lm-eval has all tasks of the paper, too."""
    registered = index.all_tasks
    defined = {name for folder in folders for name in defined_names(folder)}
    assert len(registered) > 1000
    assert set(registered) <= defined
    assert len(defined - set(registered)) < 10, "similar names would be suggested that lm-eval does not have"
    check_names(registered[::10])
    check_names(name for name in registered if not name.replace("_", "").isalnum())
    assert {protocol.task for protocol in TASKS.values()} <= set(registered)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_name(pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(backends, "check_lm_eval", lambda: pytest.fail("lm-eval was imported first"))
    with pytest.raises(CoverageError) as error:
        evaluate(str(pruned), ["piqa", name], tmp_path / "out.json")
    assert UNKNOWN[name] in str(error.value)


def test_unknown_name_beside_own_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name can be that of a task in --include-path, whose files are indexed first."""
    (tmp_path / "own.yaml").write_text("task: own\ndataset_path: json\ntest_split: test\n")
    tasks = Tasks([tmp_path])
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: pytest.fail("the index was built"))
    with pytest.raises(CoverageError, match="lm-eval has no task 'nosuch'"):
        tasks.units(["own", "nosuch"], [], EvaluationOptions())


def test_name_that_is_a_word_elsewhere(folder: Path, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of a prompt is no task; whether it is one is left to lm-eval."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: index)
    assert occurs("Question", folder)
    with pytest.raises(CoverageError, match="lm-eval has no task 'Question'"):
        Tasks().units(["Question"], [], EvaluationOptions())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("task: a", ["a"]),
        ("group: 'a-b' # c", ["a-b"]),
        ('"task": "a"', ["a"]),
        ("# task: a\ntask: b", ["b"]),
        ("tag: [a, 'b']\ntask: c", ["a", "b", "c"]),
        ("tag:\n  - a\n  - b\ntask: c", ["a", "b", "c"]),
        ("tag:\n- a\ntask: (b)", ["(b)", "a"]),
        ("metric: a\n  task: b", []),
    ],
)
def test_defined_names(tmp_path: Path, text: str, names: list[str]) -> None:
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "_template_yaml").write_text(text)
    (tmp_path / "utils.py").write_text("task: python")
    assert defined_names(tmp_path) == names
    assert all(occurs(name, tmp_path) for name in names)
    assert not occurs("python", tmp_path)


def test_seconds_until_the_error(pruned: Path, tmp_path: Path) -> None:
    """In a process of its own, no library that takes seconds to import is imported."""
    program = """
import json, sys
from moe_coverage_plugin.cli import main
status = main(sys.argv[1:])
print(json.dumps([status, [name for name in ("torch", "transformers", "lm_eval", "datasets") if name in sys.modules]]))
"""
    command = ["eval", str(pruned), "--tasks", "nosuch", "--output", str(tmp_path / "out.json")]
    run = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [2, []]
    assert run.stderr.startswith("moe-coverage: lm-eval has no task 'nosuch'")
