"""The environments are those that the lock files describe, and the lock files follow pyproject.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from requirements.lock import FOLDER, LOCKS, TORCH, read_pins, read_roots
from tests.environments import exceptions, problems

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]


def test_pip_check() -> None:
    assert problems() == exceptions("compress")


@pytest.mark.parametrize("name", LOCKS)
def test_lock_pins_each_direct_dependency_at_an_allowed_version(name: str) -> None:
    pins = read_pins(FOLDER / f"{name}.txt")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    roots = read_roots(project, LOCKS[name])
    assert roots
    for root in roots:
        version = pins.get(canonicalize_name(root.name))
        assert version is not None, f"{name}.txt does not pin {root.name}: run requirements/lock.py"
        assert root.specifier.contains(version), (
            f"{name}.txt pins {root.name} {version}, pyproject.toml allows {root.specifier}"
        )


@pytest.mark.parametrize("name", LOCKS)
def test_lock_has_one_torch_and_nothing_that_is_left_out(name: str) -> None:
    pins = read_pins(FOLDER / f"{name}.txt")
    assert pins["torch"] == TORCH
    assert not LOCKS[name].left_out.keys() & pins.keys()
