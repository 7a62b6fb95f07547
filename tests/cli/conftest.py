"""Checkpoints, made once, and the command, run inside this process."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from llmcompressor.modifiers.quantization import QuantizationModifier

from moe_coverage_plugin.cli import main
from tests.modifiers import harness

# property tests share a copy of a checkpoint, which every example restores
settings.register_profile(
    "cli", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
settings.load_profile("cli")


class Done(NamedTuple):
    """Status and output of a run."""

    status: int
    out: str
    err: str


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs ``moe-coverage`` with these arguments."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        return Done(status, *capsys.readouterr())

    return run


@pytest.fixture
def refusal(script: Callable[..., Done]) -> Callable[..., str]:
    """Runs the command, which must end with status 2, and returns the one line of the error."""

    def run(*arguments: object) -> str:
        done = script(*arguments)
        assert done.status == 2
        assert done.err.startswith("moe-coverage: ")
        assert done.err.count("\n") == 1
        return done.err

    return run


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE: 2 layers of 8 experts with 256 channels, top-2, hidden size 128, 4 heads over 2."""
    return harness.save_tiny(tmp_path_factory.mktemp("cli") / "source")


@pytest.fixture(scope="session")
def pruned(source: Path) -> Path:
    """Ragged, blocks of 64, a quarter of the channels removed, 16 bit."""
    target = source.with_name("pruned")
    harness.compress(source, harness.pruning(layer_noise=1.0), output_dir=str(target))
    return target


@pytest.fixture(scope="session")
def uniform(source: Path) -> Path:
    """All experts of width 128, in 4 bits in groups of 64."""
    target = source.with_name("uniform")
    recipe = [*harness.pruning(0.5, layout="uniform"), QuantizationModifier(**harness.W4_GROUP_64)]
    harness.compress(source, recipe, output_dir=str(target))
    return target


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2-MoE with shared experts of 384 channels, ragged, 4 bits in groups of 64."""
    folder = tmp_path_factory.mktemp("cli")
    recipe = [*harness.pruning(), QuantizationModifier(**harness.W4_GROUP_64)]
    harness.compress(harness.save_tiny(folder / "source", "qwen2_moe"), recipe, output_dir=str(folder / "shared"))
    return folder / "shared"


@pytest.fixture(scope="session")
def float8(source: Path) -> Path:
    """Ragged, with exact widths, a quarter of the channels removed, weights and activations in 8-bit floats."""
    target = source.with_name("float8")
    quantizer = QuantizationModifier(targets=["Linear"], scheme="FP8_DYNAMIC", ignore=["lm_head"])
    harness.compress(source, [*harness.pruning(block_size=None), quantizer], output_dir=str(target))
    return target


@pytest.fixture
def copy(pruned: Path, tmp_path: Path) -> Path:
    """A copy of ``pruned`` to damage."""
    return Path(shutil.copytree(pruned, tmp_path / "copy"))


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text())
