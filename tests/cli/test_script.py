"""The command in a process of its own: exit status, output, and imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_coverage_plugin.installation import how_to_install
from moe_coverage_plugin.manifest import SCORES_NAME

pytestmark = pytest.mark.slow

# not installed in vLLM's environment
BLOCKED = ("llmcompressor", "compressed_tensors", "transformers", "accelerate", "matplotlib", "jinja2", "tabulate")
SERVING = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED!r}))
from moe_coverage_plugin.cli import main
sys.exit(main())
"""


def serving(*arguments: object, program: str = SERVING, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.mark.parametrize(
    "command", [[], ["oneshot"], ["sample"], ["finetune"], ["plan"], ["inspect"], ["eval"], ["pareto"]]
)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    done = serving(*command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: moe-coverage")
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
    assert done.stderr == ""


def test_help_ends_before_torch_is_imported() -> None:
    program = SERVING.replace(
        "sys.exit(main())", "import atexit; atexit.register(lambda: print(*sys.modules)); main()"
    )
    modules = set(serving("plan", "--help", program=program).stdout.split())
    assert "argparse" in modules
    assert not modules & {"torch", "numpy", "safetensors"}


def test_inspects_without_the_toolkit(pruned: Path, script: Any) -> None:
    done = serving("inspect", pruned)
    assert done.returncode == 0, done.stderr
    assert done.stdout == script("inspect", pruned).out


@pytest.mark.parametrize("beside_vllm", [False, True])
def test_compressing_without_the_toolkit(tmp_path: Path, beside_vllm: bool) -> None:
    """In vLLM's environment, the extra [compress] would replace packages that vLLM needs."""
    (tmp_path / "vllm.py").touch()
    program = f"import sys; sys.path.append({str(tmp_path)!r})\n{SERVING}" if beside_vllm else SERVING
    done = serving("oneshot", "model", "--recipe", "fisher_p50", "--data", "text", "--output", "out", program=program)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert "moe-coverage oneshot needs llm-compressor: llmcompressor is not installed here" in line
    advice = "in an environment of its own" if beside_vllm else how_to_install("compress")
    assert advice in line


@pytest.mark.parametrize("command", ["oneshot", "finetune", "eval"])
def test_a_wrong_path_is_an_error_before_torch_is_imported(tmp_path: Path, command: str) -> None:
    """It took 19 seconds."""
    (tmp_path / "text.txt").touch()
    options = {
        "oneshot": ("--recipe", "fisher_p50", "--data", tmp_path / "text.txt"),
        "finetune": ("--text", tmp_path / "text.txt"),
        "eval": ("--text", tmp_path / "text.txt"),
    }[command]
    program = (
        "import sys\nfrom moe_coverage_plugin.cli import main\nstatus = main()\n"
        "assert not {'torch', 'transformers', 'llmcompressor'} & set(sys.modules)\nsys.exit(status)"
    )
    done = serving(command, tmp_path / "absent", *options, "--output", tmp_path / "out", program=program)
    assert done.returncode == 2, done.stderr
    assert f"{tmp_path / 'absent'} is not a model directory" in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_says_which_command_when(script: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        script("--help")
    text = capsys.readouterr().out
    parts = text.split("which command when:")
    listed, explained = (re.findall(r"^ {2,4}(\w+) {2,}\S", part, re.MULTILINE) for part in parts)
    assert [name for name in listed if name != "COMMAND"] == explained


def test_plans_without_the_toolkit(pruned: Path, script: Any) -> None:
    arguments = ("plan", pruned / SCORES_NAME, "--sparsity", 0.5)
    done = serving(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == script(*arguments).out


def test_ends_quietly_if_the_reader_ends(pruned: Path) -> None:
    command = [sys.executable, "-c", SERVING, "inspect", str(pruned)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_pictures_without_matplotlib(pruned: Path, tmp_path: Path) -> None:
    done = serving("inspect", pruned, "--pictures", tmp_path)
    assert done.returncode == 2
    assert f"is not installed here: {how_to_install('compress')}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("command", "remedy"), [("oneshot", ": give the same command again to go on"), ("plan", "")])
def test_an_interrupt_is_one_line(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str, remedy: str
) -> None:
    """Wherever it arrives, here while the modules of the command are imported."""

    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("moe_coverage_plugin.cli.import_module", interrupted)
    (tmp_path / "scores.safetensors").write_bytes(b"")
    arguments = {
        "oneshot": [tmp_path, "--recipe", "recommended_p50", "--output", tmp_path / "out"],
        "plan": [tmp_path / "scores.safetensors", "--sparsity", "0.5"],
    }
    done = script(command, *arguments[command])
    assert (done.status, done.err) == (130, f"moe-coverage: interrupted{remedy}\n")


def test_an_error_is_one_line(tmp_path: Path) -> None:
    for arguments in (["inspect", "absent"], ["plan", "absent", "--sparsity", "0.5"]):
        done = serving(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("moe-coverage: ")
        assert "absent" in done.stderr
        assert done.stderr.count("\n") == 1


def test_runs_beside_the_toolkit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "moe_coverage_plugin.cli", "inspect", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("moe-coverage: ")]
    assert "config.json cannot be read" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["plan"], ["plan", "a", "--sparsity", "x"], ["prune"], ["inspect"]])
def test_a_wrong_command_line_shows_the_usage(script: Any, arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        script(*arguments)
    assert caught.value.code == 2
    assert "usage: moe-coverage" in capsys.readouterr().err


def test_draws_results(script: Any, refusal: Any, tmp_path: Path) -> None:
    rows = [
        {"name": "a", "method": "fisher", "bytes": 7_000_000, "loss": 2.0},
        {"name": "b", "method": "REAP", "bytes": 6_000_000, "loss": 2.4},
    ]
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(map(json.dumps, rows)))
    for name, magic in (("pareto.png", b"\x89PNG"), ("pareto.html", b"<")):
        assert script("pareto", results, "--output", tmp_path / name).status == 0
        assert (tmp_path / name).read_bytes().startswith(magic)
    results.write_text("{")
    assert "line 1" in refusal("pareto", results, "--output", tmp_path / "other.png")
    results.write_text(json.dumps({"format": 1, "tasks": {}}, indent=1))
    assert "was written by moe-coverage eval: give JSON lines" in refusal(
        "pareto", results, "--output", tmp_path / "other.png"
    )
    assert not (tmp_path / "other.png").exists()
