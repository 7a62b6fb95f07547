"""Environment of the serving tests, and the checkpoints made beforehand."""

from __future__ import annotations

import os

# Engines of a test run in its own process, where errors and parameters can be looked at; set before vLLM is imported.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    """Takes the place of the outer fixture: an engine uses all cores."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
