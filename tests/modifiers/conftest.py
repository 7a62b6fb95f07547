"""Tiny models on disk. The helpers of these tests are in ``harness.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.modifiers import harness


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE: 2 layers of 8 experts with 256 channels, top-2, hidden size 128."""
    return harness.save_tiny(tmp_path_factory.mktemp("source") / "qwen3_moe")


@pytest.fixture(scope="session")
def shared_expert_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2-MoE of the same shape, with shared experts and the gate of one output in front of them."""
    return harness.save_tiny(tmp_path_factory.mktemp("source") / "qwen2_moe", "qwen2_moe")


@pytest.fixture(scope="session")
def _opened() -> dict[Path, PreTrainedModel]:
    return {}


@pytest.fixture
def pristine(source: Path, _opened: dict[Path, PreTrainedModel]):
    """One model for all tests of errors, which check that it is unchanged."""
    if source not in _opened:
        _opened[source] = harness.open_linear(source)
    yield _opened[source]
    if set(harness.flat_widths(_opened[source])) != {harness.CHANNELS}:
        del _opened[source]  # a test failed, and the other tests need an unchanged model
