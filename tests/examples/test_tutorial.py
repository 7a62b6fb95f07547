"""The commands of the tutorial run, on less text, and have the described results."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import llmcompressor  # noqa: F401  # imported once, before programs are forked
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_coverage_plugin import Manifest, load_scores
from tests import processes

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
TUTORIAL = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]
LAYERS = 2
CHANNELS = LAYERS * 16 * 384
COMPARED = ("benchmarks/testbed/mini_moe", "out/pruned", "out/recovered")
TEXT = "text.txt"
# options added to commands, because the defaults take longer; GPTQ of the recommended recipe takes 10 s each time, and
# tests of recipes run it
FEW = {
    "coverage oneshot": "--recipe fisher_p25_q4",
    "prune.py": "--windows 2 --window-tokens 32",
    "prune_and_quantize.py": "--windows 2 --window-tokens 32 --recipe fisher_p25_q4",
    "own_scores.py": f"--data {TEXT}",
    "fine_tune.py": f"--steps 2 --window-tokens 32 --data {TEXT}",
    "evaluate.py": "--documents 2",
}


def shortened(command: str) -> str:
    """Change a command to use two windows of 32 tokens."""
    command = re.sub(r"--samples \d+", "--samples 2", command)
    command = re.sub(r"--sequence-length \d+", "--sequence-length 32", command)
    return command + "".join(f" {few}" for name, few in FEW.items() if name in command)


def interpreted(line: str) -> list[str]:
    """Arguments of an interpreter that runs a command."""
    program, *arguments = shlex.split(line)
    return {"python": [], "moe-coverage": ["-m", "moe_coverage_plugin.cli"]}[program] + arguments


def write_first_layers(directory: Path) -> None:
    """Write the model of the tutorial with half of its layers."""
    shutil.copytree(REPOSITORY / COMPARED[0], directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not re.match(r"model\.layers\.[23]\.", name)}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Output of each command of the tutorial, run in a directory with links to folders of the repository."""
    directory = tmp_path_factory.mktemp("tutorial")
    (directory / "examples").symlink_to(REPOSITORY / "examples")
    write_first_layers(directory / COMPARED[0])
    text = (directory / COMPARED[0] / "calibration.txt").read_text(encoding="utf-8")
    (directory / TEXT).write_text(text[:20_000], encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    cache = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(directory / "datasets")}
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"} | cache
    outputs = {}
    for command in COMMANDS:
        line = shortened(command)
        if command.startswith("moe-coverage inspect"):
            # the installed script, in a command that imports little
            done = subprocess.run(
                line, shell=True, capture_output=True, text=True, cwd=directory, env=environment, check=False
            )
        else:
            done = processes.run(*interpreted(line), cwd=directory, env=environment)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        outputs[command] = done.stdout
    previous = Path.cwd()
    os.chdir(directory)
    yield outputs
    os.chdir(previous)


def output(printed: dict[str, str], part: str) -> str:
    (found,) = [text for command, text in printed.items() if part in command]
    return found


def kept(checkpoint: str) -> int:
    manifest = Manifest.from_checkpoint(checkpoint)
    assert manifest is not None
    return sum(map(sum, manifest.widths.values()))


def in_four_bits(checkpoint: str) -> bool:
    with safe_open(Path(checkpoint) / "model.safetensors", "pt") as file:
        return any(name.endswith("weight_packed") for name in file.keys())  # noqa: SIM118


def test_the_tutorial_has_all_examples_of_the_compressing_half() -> None:
    """Other examples are run elsewhere: ``demo.py`` by ``make demo``, those with vLLM by tests of the serving half."""
    others = {"demo.py", "generate.py", "serve_and_query.py"}
    examples = {path.name for path in (REPOSITORY / "examples").glob("*.py")} - others
    assert examples == {name for name in examples if any(f"examples/{name}" in command for command in COMMANDS)}
    assert "examples/serve_and_query.py" in TUTORIAL


def test_files_named_in_the_tutorial_exist() -> None:
    for file in re.findall(r"`((?:docs|examples|benchmarks|recipes)/[\w./]+)`", TUTORIAL):
        assert (REPOSITORY / file).exists(), file


def test_the_first_command_prunes_and_quantizes(printed: dict[str, str]) -> None:
    assert "Wrote out/first" in output(printed, "oneshot")
    assert kept("out/first") == CHANNELS * 3 // 4
    assert in_four_bits("out/first")
    assert (Path("out/first") / "README.md").is_file()
    assert (Path("out/first") / "moe_coverage_report" / "index.html").is_file()


def test_inspect_shows_the_described_lines(printed: dict[str, str]) -> None:
    shown = output(printed, "inspect")
    for text in ("kept", "coverage", "removed", "fewest tokens", "tensor parallel", "9,216 of 12,288 kept (75.0 %)"):
        assert text in shown


def test_plans_of_another_size(printed: dict[str, str]) -> None:
    plans = [text for command, text in printed.items() if command.startswith("moe-coverage plan")]
    assert len(plans) == 2
    assert all("6,144 of 12,288 kept (50.0 %)" in text for text in plans)


def test_pruning_without_quantization(printed: dict[str, str]) -> None:
    assert "model.layers.1.mlp.experts: " in output(printed, "/prune.py")
    assert kept("out/pruned") == CHANNELS * 3 // 4
    assert not in_four_bits("out/pruned")


def test_pruning_with_quantization_to_four_bits(printed: dict[str, str]) -> None:
    assert "11.40 MiB became 3.88 (34.1%)" in output(printed, "/prune_and_quantize.py")
    assert kept("out/pruned_q4") == CHANNELS * 3 // 4
    assert in_four_bits("out/pruned_q4")


def test_user_defined_scores_determine_the_plan(printed: dict[str, str]) -> None:
    """The plan keeps the blocks with the best user-defined scores, and the file describes how they were computed."""
    assert "Wrote out/own.scores.safetensors" in output(printed, "/own_scores.py")
    own, provenance = load_scores("out/own.scores.safetensors")
    measured, _ = load_scores("out/own.measured.safetensors")
    assert own.channel_metric == "own"
    assert "product of norms" in provenance["rule"]
    assert not (own.channels_LEI == measured.channels_LEI).all()
    blocks = own.channels_LEI.sort(-1, descending=True).values.unflatten(-1, (-1, 64)).sum(-1).flatten()
    threshold = blocks.sort(descending=True).values[CHANNELS * 3 // 4 // 64 - 1]
    widths = (blocks >= threshold).unflatten(0, (LAYERS, 16, -1)).sum(-1) * 64
    manifest = Manifest.from_checkpoint("out/own")
    assert manifest is not None
    assert list(manifest.widths.values()) == widths.tolist()


def test_fine_tuning_keeps_widths_and_reduces_the_loss(printed: dict[str, str]) -> None:
    printed_losses = re.search(r"Held-out loss ([\d.]+), after 2 steps ([\d.]+)", output(printed, "/fine_tune.py"))
    assert printed_losses is not None
    assert float(printed_losses[2]) < float(printed_losses[1])
    before, after = map(Manifest.from_checkpoint, ("out/pruned", "out/recovered"))
    assert before is not None
    assert after is not None
    assert after.widths == before.widths
    assert (Path("out/recovered") / "moe_coverage_recovery.jsonl").is_file()


def test_evaluation_compares_bytes_and_metrics(printed: dict[str, str]) -> None:
    table = [re.split(r"  +", line.strip()) for line in output(printed, "/evaluate.py").splitlines()]
    (header,) = [index for index, row in enumerate(table) if row[0] == "task"]
    assert table[header] == ["task", "mini_moe", "pruned", "change", "recovered", "change"]
    rows = {row[0]: row[1:] for row in table[header + 2 :]}
    assert {"weights, MiB", "prose bits_per_byte ↓", "quiz acc ↑"} <= rows.keys()
    sizes = [sum(file.stat().st_size for file in Path(each).glob("*.safetensors")) / 2**20 for each in COMPARED]
    stored, bits = ([rows[name][column] for column in (0, 1, 3)] for name in ("weights, MiB", "prose bits_per_byte ↓"))
    assert stored == [f"{size:.2f}" for size in sizes]
    assert float(bits[0]) < float(bits[2]) < float(bits[1])
