"""Opening an untrusted checkpoint runs no code of it: no pickle, and no Python file unless the caller allows it."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_coverage_plugin
from moe_coverage_plugin import CoverageError, load
from moe_coverage_plugin.cli import main
from moe_coverage_plugin.files.scores import load_scores
from moe_coverage_plugin.manifest import REPORT_NAME, SCORES_NAME
from tests.checkpoint.runs import aligned, config_json, logits, prune, source

WEIGHTS = "model.safetensors"
CODE = """
from pathlib import Path
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

Path({marker!r}).touch()


class StrangeConfig(Qwen3MoeConfig):
    model_type = {model_type!r}


class StrangeForCausalLM(Qwen3MoeForCausalLM):
    config_class = StrangeConfig
"""


class Touch:
    """Creates a directory when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("foreign")
    prune(source(directory / "model"), directory / "out")
    return directory / "out"


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A path that exists once code of the checkpoint has run."""
    return tmp_path / "marker"


def name_code(copy: Path, marker: Path, model_type: str) -> None:
    """Put a modeling file beside the weights, and name it in the config."""
    (copy / "modeling_strange.py").write_text(CODE.format(marker=str(marker), model_type=model_type))
    named = {"AutoConfig": "modeling_strange.StrangeConfig"}
    named |= dict.fromkeys(
        ("AutoModelForCausalLM", "AutoModelForImageTextToText"), "modeling_strange.StrangeForCausalLM"
    )
    config = config_json(copy) | {"model_type": model_type, "auto_map": named}
    (copy / "config.json").write_text(json.dumps(config))


def inspect(directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status and complete output of ``moe-coverage inspect``."""
    capsys.readouterr()
    status = main(["inspect", str(directory)])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


def test_code_for_an_unknown_architecture_does_not_run(
    copy: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name_code(copy, marker, "strange_moe")
    # without trust_remote_code=False transformers asks on the terminal
    monkeypatch.setattr("builtins.input", lambda _prompt: "y")
    with pytest.raises(CoverageError, match="trust_remote_code=True") as caught:
        load(copy)
    assert "\n" not in str(caught.value)
    assert not marker.exists()
    status, printed = inspect(copy, capsys)
    assert (status, marker.exists()) == (0, False)
    assert "auto_map), which were not run" in printed


def test_code_for_a_known_architecture_is_not_used(copy: Path, checkpoint: Path, marker: Path) -> None:
    """Published checkpoints of known families still name the code that they were published with."""
    name_code(copy, marker, "qwen3_moe")
    assert torch.equal(logits(aligned(load(copy))), logits(aligned(load(checkpoint))))
    assert not marker.exists()
    assert "modeling_strange" not in " ".join(sys.modules)


def test_trusted_code_runs(copy: Path, checkpoint: Path, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the marker works: if the caller allows it, the same file is imported."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(marker.parent / "modules"))
    name_code(copy, marker, "strange_moe")
    model = load(copy, trust_remote_code=True)
    assert marker.exists()
    assert type(model).__name__ == "StrangeForCausalLM"
    assert torch.equal(logits(aligned(model)), logits(aligned(load(checkpoint))))


def test_attention_from_the_hub_is_not_used(copy: Path) -> None:
    config = config_json(copy) | {"attn_implementation": "stranger/kernel"}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CoverageError, match="attention computed by stranger/kernel, code from elsewhere"):
        load(copy)


def test_a_pickle_instead_of_weights(copy: Path, marker: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / WEIGHTS).unlink()
    index = {"weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        (copy / name).write_bytes(pickle.dumps(Touch(marker)))
    for named in (None, "pytorch_model.bin.index.json"):
        if named is not None:
            (copy / named).write_text(json.dumps(index))
        with pytest.raises(CoverageError, match="holds no weights, neither"):
            load(copy)
        status, printed = inspect(copy, capsys)
        assert (status, "holds no weights" in printed) == (2, True)
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CoverageError, match=r"lists 'pytorch_model\.bin', but only safetensors files"):
        load(copy)
    assert inspect(copy, capsys)[0] == 2
    assert not marker.exists()


@pytest.mark.parametrize("name", [WEIGHTS, SCORES_NAME, REPORT_NAME, "config.json", "generation_config.json"])
def test_a_pickle_under_the_name_of_another_file(
    copy: Path, marker: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (copy / name).write_bytes(pickle.dumps(Touch(marker)))
    if name == SCORES_NAME:
        with pytest.raises(CoverageError, match="cannot be read"):
            load_scores(copy / name)
    else:
        with pytest.raises(CoverageError, match=re.escape(name)):
            load(copy)
    inspect(copy, capsys)
    assert not marker.exists()
    torch_zip = copy.parent / "torch.bin"
    torch.save(Touch(marker), torch_zip)
    shutil.copyfile(torch_zip, copy / name)
    if name != SCORES_NAME:
        with pytest.raises(CoverageError, match=re.escape(name)):
            load(copy)
    inspect(copy, capsys)
    assert not marker.exists()


def test_the_pickle_creates_the_marker(marker: Path) -> None:
    pickle.loads(pickle.dumps(Touch(marker)))
    assert marker.exists()


UNPICKLERS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNPICKLING_CALLS = {"torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "pd.read_pickle"}
# calls by which the package lets transformers open something, and whether they pass trust_remote_code
OPENED = {
    "cli/calibration_data.py": {"AutoConfig.from_pretrained": True, "AutoTokenizer.from_pretrained": True},
    "checkpoint/opening.py": {"AutoModelForCausalLM.from_pretrained": True},
    "cli/sample.py": {"AutoConfig.from_pretrained": True, "AutoTokenizer.from_pretrained": True},
    "sampling/dataset.py": {"AutoTokenizer.from_pretrained": True},
    "evaluation/backends.py": {"AutoModelForCausalLM.from_pretrained": True, "AutoTokenizer.from_pretrained": True},
    "recovery/source.py": {"AutoTokenizer.from_pretrained": True},
    "recovery/teacher.py": {"AutoModelForCausalLM.from_pretrained": True},
    # the toolkit's description of experts, made from a config
    "modeling/moe_layers.py": {"MoEConfig.from_config": False},
    "checkpoint/model_config.py": {"AutoConfig.from_pretrained": True},
    "checkpoint/skeleton.py": {"factory.from_config": True},
    # has no code to run
    "checkpoint/loading.py": {"GenerationConfig.from_pretrained": False},
}


def test_nothing_in_the_package_unpickles_or_opens_models_elsewhere() -> None:
    package = Path(moe_coverage_plugin.__file__).parent
    opened: dict[str, dict[str, bool]] = {}
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name.partition(".")[0] for alias in node.names} & UNPICKLERS, file
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] not in UNPICKLERS, file
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                call = ast.unparse(node.func)
                # takes tensors only
                safe = any(each.arg == "weights_only" and ast.unparse(each.value) == "True" for each in node.keywords)
                assert call not in UNPICKLING_CALLS or (call == "torch.load" and safe), file
                if node.func.attr in ("from_pretrained", "from_config") and not call.startswith("super()"):
                    says = any(keyword.arg == "trust_remote_code" for keyword in node.keywords)
                    opened.setdefault(str(file.relative_to(package)), {})[call] = says
    assert opened == OPENED
