"""Environment of the serving tests, and the checkpoints made beforehand."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

# engines of a test run in its own process, so that it can see errors and parameters; set before vLLM is imported
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare for engines before the process is forked, so that programs of tests need not."""
    if any(item.get_closest_marker("engine") for item in session.items):
        from tests.serving.engine import prepare_process

        prepare_process()


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    """Replaces the outer fixture: an engine uses all cores."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Messages that vLLM's loggers get during a test, each as ``LEVEL message``."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(f"{record.levelname} {record.getMessage()}")
    logging.getLogger("vllm").addHandler(handler)
    yield messages
    logging.getLogger("vllm").removeHandler(handler)
