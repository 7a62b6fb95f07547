"""The recipes of the package: found, run, saved, reopened, run again from recipe.yaml, and part of a wheel."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from transformers import PreTrainedModel

from moe_coverage_plugin import CoverageError, Manifest, load, recipe_path
from tests.modifiers.harness import compress, logits, widths
from tests.tiny import save_model, token_batches

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = sorted(file.stem for file in (REPOSITORY / "recipes").glob("*.yaml"))


LAYERS, EXPERTS, CHANNELS = 2, 4, 256


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of two blocks of 128 channels."""
    shape = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "moe_intermediate_size": CHANNELS}
    return save_model(tmp_path_factory.mktemp("wide") / "model", **shape)


@dataclass
class Run:
    model: PreTrainedModel
    output: Path


# recipes that differ from others in their sparsity, channel scores or blocks only
ALIKE = ("coverage_p25_gptq_a64", "coverage_p25_q4", "fisher_p50", "fisher_p50_q4", "recommended_p50_q4")


@pytest.fixture(scope="module", params=[name for name in NAMES if name not in ALIKE])
def first(request: pytest.FixtureRequest, wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of a recipe of the package."""
    output = tmp_path_factory.mktemp(request.param) / "out"
    return Run(compress(wide, recipe_path(request.param), dataset=token_batches(), output_dir=str(output)), output)


@pytest.mark.slow
def test_recipe_runs_and_reopens(first: Run, request: pytest.FixtureRequest):
    recipe = recipe_path(request.node.callspec.params["first"])
    options = next(iter(yaml.safe_load(Path(recipe).read_text()).values()))["prune_modifiers"]
    budget = round((1 - options["CoverageModifier"]["sparsity"]) * LAYERS * EXPERTS * CHANNELS)
    kept, block = sum(map(sum, widths(first.model))), options.get("AlignmentModifier", {}).get("block_size", 1)
    assert kept == budget if block == 1 else 0.8 * budget < kept <= budget
    assert Manifest.from_checkpoint(first.output).block_size == block
    # weights that are mapped from a file are aligned otherwise in memory, and so are summed in another order
    torch.testing.assert_close(logits(load(first.output)), logits(first.model), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_recipe_beside_a_checkpoint_makes_it_again(first: Run, wide: Path, tmp_path: Path):
    """It lists all fields, those included that have no effect."""
    written = first.output / "recipe.yaml"
    again = compress(wide, str(written), dataset=token_batches(), output_dir=str(tmp_path / "again"))
    assert widths(again) == widths(first.model)
    assert torch.equal(logits(again), logits(first.model))
    assert (tmp_path / "again" / "recipe.yaml").read_text() == written.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_recipe_path(name: str):
    assert recipe_path(name) == recipe_path(f"{name}.yaml") == str(REPOSITORY / "recipes" / f"{name}.yaml")


@pytest.mark.parametrize("name", ["coverage", "../pyproject", "", "coverage_p25_q4.yml"])
def test_unknown_recipe(name: str):
    with pytest.raises(CoverageError, match=r"known are .*coverage_p25_q4"):
        recipe_path(name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", directory]
    subprocess.run([*build, REPOSITORY], check=True, cwd=directory)
    return next(directory.glob("*.whl"))


def test_wheel_holds_recipes_and_marker(wheel: Path):
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {f"moe_coverage_plugin/recipes/{name}.yaml" for name in NAMES} <= files
    assert "moe_coverage_plugin/py.typed" in files
    assert not [file for file in files if file.startswith(("tests", "benchmarks"))]


def test_installed_package_finds_its_recipes(wheel: Path, tmp_path: Path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    # without the toolkit, which takes seconds to import
    code = (
        "import importlib.util, sys; find = importlib.util.find_spec;"
        "importlib.util.find_spec = lambda name, *a: None if name == 'llmcompressor' else find(name, *a);"
        "import moe_coverage_plugin as m; print(m.__file__); [print(m.recipe_path(name)) for name in sys.argv[1:]]"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, *NAMES],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    module, *paths = run.stdout.split()
    package = tmp_path / "site" / "moe_coverage_plugin"
    assert module == str(package / "__init__.py")
    assert paths == [str(package / "recipes" / f"{name}.yaml") for name in NAMES]
    assert all(
        Path(path).read_text() == Path(recipe_path(name)).read_text() for name, path in zip(NAMES, paths, strict=True)
    )
