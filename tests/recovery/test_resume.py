"""A run that is killed and started again gives the bit-identical result of an uninterrupted one."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch

from moe_coverage_plugin import CoverageError, finetune
from moe_coverage_plugin.cli import main
from moe_coverage_plugin.recovery import RecoveryOptions
from moe_coverage_plugin.recovery.curve import CURVE_NAME
from moe_coverage_plugin.recovery.state import STATE_NAME, WorkFolder
from tests import processes
from tests.checkpoint.runs import tensors
from tests.recovery.cycles import FAST, cycles

pytestmark = pytest.mark.slow

STEPS = 24


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text as JSON lines, in the vocabulary of the tiny tokenizer."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    rows = [json.dumps({"text": " ".join(f"w{token}" for token in row)}) for row in cycles(seed=1)["input_ids"]]
    path.write_text("\n".join(rows))
    return path


def arguments(pruned: Path, words: Path, output: Path) -> list[str]:
    values = FAST | {"steps": STEPS, "save_every": 3, "balance": 0.1}
    options = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return ["finetune", str(pruned), "--text", str(words), "--output", str(output), *options]


def without_seconds(points: list[dict]) -> list[dict]:
    return [{name: value for name, value in point.items() if name != "seconds"} for point in points]


@pytest.fixture(scope="module")
def killed(pruned: Path, words: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output directory of a run that was killed after its first saved state."""
    output = tmp_path_factory.mktemp("killed") / "out"
    run = processes.start("-m", "moe_coverage_plugin.cli", *arguments(pruned, words, output))
    state = output.with_name("out.work") / STATE_NAME
    deadline = time.monotonic() + 300
    while not state.exists() and run.returncode is None and time.monotonic() < deadline:
        time.sleep(0.005)
    run.kill()
    assert run.wait() == -signal.SIGKILL, run.stderr[-2000:]
    assert state.exists()
    assert not output.exists()
    return output


def test_a_run_with_other_options_does_not_resume(killed, pruned, words):
    changed = RecoveryOptions(**FAST | {"steps": STEPS, "save_every": 3, "balance": 0.2})
    with pytest.raises(CoverageError, match=r"another run \(balance 0\.1, now 0\.2\)"):
        finetune(pruned, [words], killed, changed)
    with pytest.raises(CoverageError, match=r"another run .*text_sha256"):
        finetune(pruned, cycles(seed=3), killed, changed.model_copy(update={"balance": 0.1}))


def test_a_resumed_run_gives_a_bit_identical_result(killed, pruned, words, tmp_path, capsys):
    step = WorkFolder(killed.with_name("out.work"), {})._metadata()["step"]
    assert 0 < step < STEPS
    assert main(arguments(pruned, words, killed)) == 0
    assert f"after {STEPS} steps" in capsys.readouterr().out
    options = RecoveryOptions(**FAST | {"steps": STEPS, "save_every": 3, "balance": 0.1})
    uninterrupted = finetune(pruned, [words], tmp_path / "uninterrupted", options)
    first, second = tensors(tmp_path / "uninterrupted"), tensors(killed)
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    lines = [json.loads(line) for line in (killed / CURVE_NAME).read_text().splitlines()]
    assert without_seconds(lines) == without_seconds(uninterrupted.points)
    assert not killed.with_name("out.work").exists()


def test_a_work_folder_with_other_files_is_an_error(pruned, text, tmp_path, fast):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").touch()
    with pytest.raises(CoverageError, match="has other files"):
        finetune(pruned, text, tmp_path / "out", fast, work=tmp_path / "work")
    (tmp_path / "work" / STATE_NAME).write_bytes(b"\x10")
    with pytest.raises(CoverageError, match="cannot be read"):
        finetune(pruned, text, tmp_path / "out", fast, work=tmp_path / "work")
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == [STATE_NAME, "thesis.tex"]
    assert not (tmp_path / "out").exists()
