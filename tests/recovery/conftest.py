"""Tiny pruned checkpoints, and text that models learn in a few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset

from moe_coverage_plugin.recovery import RecoveryOptions
from tests.checkpoint.runs import prune, source
from tests.recovery.cycles import FAST, cycles


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE: 2 layers of 8 experts with 128 channels, top-2."""
    return source(tmp_path_factory.mktemp("recovery") / "original")


@pytest.fixture(scope="session")
def pruned(original: Path) -> Path:
    """A ragged checkpoint in blocks of 32, with half of the channels and some entire experts removed."""
    prune(original, original.with_name("pruned"), sparsity=0.5)
    return original.with_name("pruned")


@pytest.fixture(scope="session")
def four_bits(original: Path) -> Path:
    """The pruned checkpoint in W4A16 with groups of 32."""
    prune(original, original.with_name("four_bits"), quantize=True, sparsity=0.5)
    return original.with_name("four_bits")


@pytest.fixture(scope="session")
def text() -> Dataset:
    return cycles(seed=1)


@pytest.fixture
def fast() -> RecoveryOptions:
    return RecoveryOptions(**FAST)
