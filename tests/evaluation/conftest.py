"""A tiny model, two pruned checkpoints of it, and a writer of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from tests.checkpoint.runs import prune, source


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Use a temporary cache of data sets in these tests."""
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("datasets")
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE: 2 layers of 8 experts with 128 channels, top-2, float32."""
    return source(tmp_path_factory.mktemp("evaluation") / "original", max_position_embeddings=1024)


@pytest.fixture(scope="session")
def pruned(original: Path) -> Path:
    """A ragged checkpoint in blocks of 32."""
    prune(original, original.with_name("pruned"))
    return original.with_name("pruned")


@pytest.fixture(scope="session")
def four_bits(original: Path) -> Path:
    """The pruned checkpoint in W4A16 with groups of 32."""
    prune(original, original.with_name("four_bits"), quantize=True)
    return original.with_name("four_bits")


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    """Function that writes a file of JSON lines."""

    def write(name: str, rows: Sequence[Any]) -> Path:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path

    return write
