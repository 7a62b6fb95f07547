"""A tiny model with a tokenizer and texts, and a bench for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.allocation.bench import Bench, open_linear
from benchmarks.allocation.text import Windows
from tests.tiny import VOCAB, add_tokenizer, save_model

LAYERS, CHANNELS = 2, 192


def words(count: int, seed: int) -> str:
    """Text in which each word is one token of the tiny tokenizer."""
    # without low numbers, because the names of the special tokens, w0 and w1, would be found in longer ones like w12
    ids = torch.randint(200, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in ids.tolist())


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE with texts: 2 layers of 8 experts with 192 channels, top-2, hidden size 128."""
    path = tmp_path_factory.mktemp("tiny") / "qwen3_moe"
    save_model(path, num_hidden_layers=LAYERS, moe_intermediate_size=CHANNELS, max_position_embeddings=512)
    add_tokenizer(path)
    (path / "calibration.txt").write_text(words(5 * 512, seed=1))
    (path / "heldout.txt").write_text(words(2 * 512, seed=2))
    return path


@pytest.fixture(scope="session")
def calibration() -> Windows:
    ids = torch.randint(2, VOCAB, (2, 512), generator=torch.Generator().manual_seed(3))
    return Windows(ids, "random")


@pytest.fixture(scope="session")
def bench(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A bench in bfloat16, the dtype in which bytes of checkpoints are counted."""
    evaluation = {"random": Windows(torch.randint(2, VOCAB, (1, 512)), "random")}
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    folder = tmp_path_factory.mktemp("scores")
    return Bench(
        open_linear(model_path, torch.bfloat16, torch.device("cpu")),
        tokenizer,
        evaluation,
        torch.device("cpu"),
        folder,
    )
