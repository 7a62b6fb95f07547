"""Makes the tiny models and the helpers beside the tests importable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    # the tensors are tiny
    torch.set_num_threads(1)
