"""The benchmark of the whole job: a real run on a tiny shape, what a killed run leaves, and the computed needs."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.whole_job.__main__ import COMPUTED, main
from benchmarks.whole_job.hooks import timed
from benchmarks.whole_job.needs import compressed_bytes, gradient_pass_bytes, needs, parameters, table
from benchmarks.whole_job.record import Recorder
from benchmarks.whole_job.render import section
from benchmarks.whole_job.shapes import SHAPES
from moe_coverage_plugin.files.progress import Progress
from moe_coverage_plugin.manifest import Manifest
from tests import processes

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
SETTINGS = {"shape": "tiny", "config": SHAPES["tiny"].config, "length": 64, "seed": 0}
RUN = {"job": "ours", "command": "python -m benchmarks.whole_job", "tokens": 256}

RUN_ENVIRONMENT = {"card": None, "cpu": "a CPU", "threads": 1, "host_bytes": 2**30, "versions": {"torch": "2"}}


def run(directory: Path, *arguments: str) -> None:
    given = ["--shape", "tiny", "--samples", "4", "--length", "64", "--batch-size", "2"]
    main([*given, "--directory", str(directory / "job"), "--output", str(directory / "job.json"), *arguments])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The phases of both jobs, in commands of their own."""
    directory = tmp_path_factory.mktemp("whole_job")
    for phases in ("checkpoint", "forward,scores", "compression", "serving", "reap"):
        run(directory, "--phases", phases)
    return directory


def phases_of(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    runs = json.loads(file.read_text())["runs"]
    return {(run["job"], phase["name"]): phase for run in runs for phase in run["phases"]}


def test_phases_are_measured_across_commands(measured: Path):
    phases = phases_of(measured / "job.json")
    ours = ("opening", "plain forward", "checks", "gradient pass", "channel interactions", "plan", "alignment")
    expected = [("checkpoint", "writing random weights")]
    expected += [("ours", name) for name in (*ours, "reconstruction and quantization", "saving")]
    expected += [("reap", name) for name in ("opening", "checks", "pruning by REAP", "quantization by GPTQ", "saving")]
    assert list(phases) == expected
    assert all(phase["done"] and phase["host_peak_bytes"] > 0 for phase in phases.values())
    assert phases["ours", "reconstruction and quantization"]["progress"] == [2, 2]
    assert phases["ours", "gradient pass"]["progress"] == [2, 2]
    assert phases["reap", "quantization by GPTQ"]["progress"] == [2, 2]


def test_parts_add_up_to_their_phase(measured: Path):
    phase = phases_of(measured / "job.json")["ours", "reconstruction and quantization"]
    assert {"GPTQ", "fits", "forward up to the experts", "rest"} <= set(phase["parts"])
    # parts below a millisecond are left out
    total = sum(part["seconds"] for part in phase["parts"].values())
    assert phase["seconds"] - 0.05 < total <= phase["seconds"] + 1e-6


def test_written_bytes_are_those_of_the_checkpoints(measured: Path):
    phases, record = phases_of(measured / "job.json"), json.loads((measured / "job.json").read_text())
    stored = {run["job"]: run["stored_bytes"] for run in record["runs"] if "stored_bytes" in run}
    assert stored["ours"] <= phases["ours", "saving"]["written_bytes"]
    assert (
        2 * parameters(SHAPES["tiny"].config).total <= phases["checkpoint", "writing random weights"]["written_bytes"]
    )
    assert not (measured / "job" / "reap").exists()
    assert [run["resumed"] for run in record["runs"] if "resumed" in run] == [False]
    # headers of files, shapes of packed weights and norms are small but not nothing here
    assert stored["ours"] == pytest.approx(compressed_bytes(SHAPES["tiny"].config), rel=0.1)


def test_the_plan_of_random_weights_is_ragged(measured: Path):
    manifest = Manifest.from_checkpoint(measured / "job" / "ours")
    assert manifest is not None
    assert all(len(set(widths)) > 1 for widths in manifest.widths.values())


def test_tables_have_ratios_and_say_what_was_left_out(measured: Path):
    text = section(json.loads((measured / "job.json").read_text()))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    (forward,) = [line.split(" | ") for line in lines if line.startswith("| ours | plain forward |")]
    assert forward[3] == "256"
    assert forward[5] == "1.00"
    assert "opening in vLLM was left out, because --serve-python names no interpreter" in text
    assert any(line.startswith("| this package | 256 |") for line in lines)
    assert any(line.startswith("| REAP + W4A16 of llm-compressor | 256 |") for line in lines)


def test_a_job_on_a_budget_of_gpu_memory(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With weights on disk, its plan is that of the job in memory; without a GPU, the limit is left out here."""
    limits: list[float] = []
    monkeypatch.setattr("benchmarks.whole_job.jobs.limit_gpu_memory", limits.append)
    output = tmp_path / "budget.json"
    run(
        measured,
        "--phases",
        "forward,scores,compression",
        "--gpu-memory",
        "24",
        "--device-map",
        "disk",
        "--output",
        str(output),
    )
    assert limits == [24]
    record = json.loads(output.read_text())
    (found,) = record["runs"]
    assert found["plan_equals"] == {"scores": True, "widths": True, "kept channels": True}
    phases = {phase["name"]: phase for phase in found["phases"]}
    assert "plain forward" not in phases
    # forward and back again, and the layers once
    assert phases["gradient pass"]["progress"] == [4, 4]
    assert phases["reconstruction and quantization"]["progress"] == [2, 2]
    text = section(record)
    assert "ours-24GiB-disk: scores, widths, kept channels equal those of the job in memory bit for bit." in text
    assert "| this package with 24 GiB of GPU memory, weights on disk |" in text
    # links to weights are removed
    assert not list((measured / "job").glob("*.partial"))
    assert not list((measured / "job").glob(".*.partial"))


def test_plans_that_differ_are_said():
    run = RUN | {"job": "ours-24GiB-cpu", "environment": RUN_ENVIRONMENT, "phases": []}
    record = SETTINGS | {"runs": [run | {"plan_equals": {"scores": False, "widths": True, "kept channels": False}}]}
    line = "ours-24GiB-cpu: widths equal those of the job in memory bit for bit; scores, kept channels differ from"
    assert line in section(record)
    assert "its plan was not compared" in section(SETTINGS | {"runs": [run | {"plan_equals": None}]})


def test_results_are_written_between_markers(measured: Path, tmp_path: Path):
    page = tmp_path / "RESULTS.md"
    main(["--render", str(measured / "job.json"), "--page", str(page)])
    assert "## A whole job, phase by phase" in page.read_text()
    assert "| this package" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--phases", "compression"), "no scores.safetensors: run --phases scores first"),
        (("--phases", "scores"), "no complete checkpoint: run --phases checkpoint first"),
        (("--phases", "fits"), "unknown phase 'fits'"),
        (("--phases", "reap", "--no-beside"), "leaves nothing to measure"),
        (("--phases", "opening", "--gpu-memory", "24"), "limits the memory of a GPU, and there is none"),
    ],
)
def test_missing_phases_stop_the_command(
    arguments: tuple[str, ...], message: str, tmp_path: Path, measured: Path, capsys: pytest.CaptureFixture[str]
):
    directory = tmp_path
    if "compression" in arguments:
        (tmp_path / "job").mkdir()
        (tmp_path / "job" / "model").symlink_to(measured / "job" / "model")
    with pytest.raises(SystemExit):
        run(directory, *arguments)
    assert message in capsys.readouterr().err


def test_a_file_of_another_model_stops_the_command(measured: Path, capsys: pytest.CaptureFixture[str]):
    before = (measured / "job.json").read_bytes()
    with pytest.raises(SystemExit):
        run(measured, "--phases", "forward", "--seed", "7")
    assert "has runs with another seed: choose another --output" in capsys.readouterr().err
    assert (measured / "job.json").read_bytes() == before


def test_a_disk_that_is_too_small_stops_before_anything_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run(tmp_path, "--phases", "checkpoint", "--shape", "deepseek-v3")
    assert "free disk and the checkpoint with the results beside it takes 1607 GB" in capsys.readouterr().err
    assert not list((tmp_path / "job").iterdir())


def test_a_killed_run_leaves_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "job.json"
    monkeypatch.setattr("benchmarks.whole_job.record.SECONDS_BETWEEN_WRITES", 0.0)
    recorder = Recorder(file, SETTINGS, RUN, tmp_path)
    with recorder.phase("opening"):
        time.sleep(0.01)
    phase = recorder.phase("reconstruction and quantization")
    phase.__enter__()
    recorder.progress(17, 48)
    # nothing more is written once a process is killed
    opening, reconstruction = json.loads(file.read_text())["runs"][0]["phases"]
    assert opening["done"]
    assert opening["seconds"] >= 0.01
    assert not reconstruction["done"]
    assert reconstruction["seconds"] > 0
    assert "reconstruction and quantization (ended at 17 of 48)" in section(json.loads(file.read_text()))
    phase.__exit__(None, None, None)


WRITER = """
import sys, time
from pathlib import Path
from benchmarks.whole_job.record import Recorder
from tests.benchmarks.test_whole_job import RUN, SETTINGS

file, go, job = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
recorder = Recorder(file, SETTINGS, RUN | {"job": job}, file.parent)
while not go.exists():
    time.sleep(0.001)
for number in range(40):
    recorder.add({"name": f"phase {number}"})
"""


def test_two_commands_at_once_keep_the_phases_of_each_other(tmp_path: Path):
    """With a run that was there before, which has no identifier."""
    file, go, jobs = tmp_path / "results" / "job.json", tmp_path / "go", ("ours", "reap")
    file.parent.mkdir()
    file.write_text(json.dumps(SETTINGS | {"runs": [RUN | {"job": "checkpoint", "phases": []}]}))
    commands = [processes.start("-c", WRITER, file, go, job, cwd=REPOSITORY) for job in jobs]
    deadline = time.monotonic() + processes.TIMEOUT_S
    while len(json.loads(file.read_text())["runs"]) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    go.touch()
    for command in commands:
        assert command.wait() == 0, command.stderr[-4000:]
    runs = {run["job"]: run for run in json.loads(file.read_text())["runs"]}
    assert sorted(runs) == ["checkpoint", *jobs]
    for job in jobs:
        assert [phase["name"] for phase in runs[job]["phases"]] == [f"phase {number}" for number in range(40)]
    assert [each.name for each in file.parent.iterdir()] == ["job.json"]


def test_a_job_counts_the_killed_run_that_it_went_on_from_and_not_serving():
    def phase(name: str, seconds: float, done: bool) -> dict[str, Any]:
        sizes = {"gpu_allocated_bytes": None, "gpu_reserved_bytes": None, "host_peak_bytes": 2**30}
        return {"name": name, "done": done, "seconds": seconds, "parts": {}, "progress": [8, 48], **sizes}

    ours = RUN | {"environment": RUN_ENVIRONMENT}
    killed = ours | {"phases": [phase("opening", 30, True), phase("reconstruction and quantization", 570, False)]}
    rest = ours | {"phases": [phase("opening", 30, True), phase("reconstruction and quantization", 90, True)]}
    served = ours | {"phases": [phase("opening in vLLM", 60, True)], "serving_versions": {"vllm": "0.32"}}
    minutes = {False: (30 + 90) / 60, True: (30 + 570 + 90) / 60}
    for resumed, expected in minutes.items():
        runs = [killed, rest | {"stored_bytes": 10**9, "resumed": resumed}, served]
        text = section(SETTINGS | {"runs": runs})
        (total,) = [line.split("|") for line in text.splitlines() if line.startswith("| this package")]
        # a job ends when its checkpoint is saved
        assert total[3].strip() == f"{expected:.1f}"
        assert "- ours: opened by vllm 0.32." in text


def test_parts_of_each_job_are_listed():
    def run(job: str, seconds: float) -> dict[str, Any]:
        phase = {"name": "reconstruction", "done": True, "seconds": 2 * seconds, "host_peak_bytes": 0}
        parts = {"fits": {"calls": 1, "seconds": seconds}}
        return RUN | {"job": job, "environment": RUN_ENVIRONMENT, "phases": [phase | {"parts": parts}]}

    text = section(SETTINGS | {"runs": [run("ours", 1.0), run("ours", 3.0), run("ours-16bit", 5.0)]})
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| fits " in line]
    assert [(job, seconds, share) for job, _, _, _, seconds, share in lines] == [
        ("ours", "3.0", "50%"),
        ("ours-16bit", "5.0", "50%"),
    ]


def test_a_run_that_finds_progress_says_so(tmp_path: Path):
    file = tmp_path / "job.json"
    with timed(Recorder(file, SETTINGS, RUN, tmp_path), saves=False):
        progress = Progress(tmp_path / "progress", "reconstruction", {})
        assert progress.load("layer") is None
        assert "resumed" not in json.loads(file.read_text())["runs"][0]
        progress.save("layer", {"weight": torch.zeros(2)})
        assert progress.load("layer") is not None
    progress.remove()
    assert json.loads(file.read_text())["runs"][0]["resumed"]


def test_jobs_of_several_machines_name_theirs():
    other = RUN | {"job": "reap", "phases": [], "environment": RUN_ENVIRONMENT | {"versions": {"torch": "1"}}}
    text = section(SETTINGS | {"runs": [RUN | {"phases": [], "environment": RUN_ENVIRONMENT}, other]})
    assert "- Machine of ours: No card, a CPU" in text
    assert "- Machine of reap: No card, a CPU" in text


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_model(name: str):
    fields = dict(SHAPES[name].config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    counted = parameters(SHAPES[name].config)
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    assert counted.experts == sum(parameter.numel() for parameter in experts)


def test_computed_memory_of_the_gradient_pass_is_near_the_measured_one():
    """Against 24 layers of Qwen3-30B-A3B on an H200; `fisher` keeps no moments of output gradients."""
    record = json.loads((REPOSITORY / "benchmarks" / "calibration.json").read_text())
    runs = {run["name"]: run for run in record["results"]}
    config = SHAPES["qwen3-30b-a3b"].config | {"num_hidden_layers": runs["gradients"]["layers"]}
    terms = gradient_pass_bytes(config, runs["gradients"]["batch_tokens"])
    computed = needs(config).weights + sum(terms.values())
    without = computed - terms["curvature of the layers, 4 L H^2"]
    assert without == pytest.approx(runs["gradients"]["peak_gib"] * 2**30, rel=0.05)
    assert computed == pytest.approx(runs["gradients and interactions"]["peak_gib"] * 2**30, rel=0.05)


def test_the_page_has_the_computed_table():
    page = (REPOSITORY / "docs" / "scaling.md").read_text(encoding="utf-8")
    computed = table({name: SHAPES[name] for name in COMPUTED}, SHAPES[COMPUTED[0]])
    assert [line for line in computed.splitlines() if line not in page.splitlines()] == []
