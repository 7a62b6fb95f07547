"""The model card agrees with the files of the checkpoint, and its code runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants
from huggingface_hub.repocard import RepoCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_coverage_plugin import Manifest, load
from moe_coverage_plugin.checkpoint.model_card import write_card
from moe_coverage_plugin.checkpoint.origin import CARD_NAME, Origin, read_origin
from tests.checkpoint.runs import FP8, W4, config_json, prune, source, tensors

QUANTIZERS = {"w4a16": W4, "decompressed": W4, "fp8": FP8}
LICENSED = "---\nlicense: apache-2.0\nlanguage: [en, de]\ntags: [theirs]\nbase_model: not/ours\n---\n# Base\n"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = source(tmp_path_factory.mktemp("card") / "base")
    (base / CARD_NAME).write_text(LICENSED)
    return base


@pytest.fixture(scope="module", params=["16bit", "w4a16", "fp8", "decompressed", "uniform"])
def checkpoint(request: pytest.FixtureRequest, qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("out") / "my checkpoint's"
    layout = "uniform" if request.param == "uniform" else "ragged"
    prune(qwen, output, layout, quantize=QUANTIZERS.get(request.param, False))
    if request.param == "decompressed":
        again = output.with_name("again")
        load(output).save_pretrained(again)
        return again
    return output


def card(checkpoint: Path) -> str:
    return (checkpoint / CARD_NAME).read_text(encoding="utf-8")


def front_matter(text: str) -> dict[str, Any]:
    found = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    assert found is not None
    return yaml.safe_load(found[1])


def facts(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", text, re.MULTILINE))


def code(text: str, language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return found


def stored_bits(checkpoint: Path) -> int:
    """Bits of quantized weights; 16 if nothing is quantized."""
    found = tensors(checkpoint)
    scaled = {name.removesuffix("_scale") for name in found if name.endswith("weight_scale")}
    return 16 if not scaled else 8 if scaled <= found.keys() else 4


def test_front_matter_is_what_the_hub_reads(checkpoint: Path) -> None:
    found = front_matter(card(checkpoint))
    assert RepoCard.load(checkpoint / CARD_NAME).data.to_dict() == found
    assert (found["license"], found["language"]) == ("apache-2.0", ["en", "de"])
    assert "base_model" not in found, "a directory does not have its name on the hub"
    assert {"pruning", "moe", "moe-coverage"} <= set(found["tags"])
    bits = stored_bits(checkpoint)
    assert [tag for tag in found["tags"] if tag.endswith("-bit")] == ([f"{bits}-bit"] if bits < 16 else [])
    stock = config_json(checkpoint).get("quantization_config") is None
    assert found["library_name"] == ("transformers" if stock else "vllm")
    if stock:
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_figures_equal_those_of_the_files(checkpoint: Path) -> None:
    text, manifest = card(checkpoint), Manifest.from_checkpoint(checkpoint)
    assert manifest is not None
    widths = [width for layer in manifest.widths.values() for width in layer]
    kept, channels = [width for width in widths if width], len(widths) * 128
    removed = f"{1 - sum(widths) / channels:.1%}"
    found = facts(text)
    assert found["expert channels"] == f"{sum(widths):,} of {channels:,} kept, {removed} removed"
    assert found["width of an expert"].startswith(f"{min(kept)} to {max(kept)}, mean ")
    assert found["experts"].startswith(f"{len(kept)} of {len(widths)} kept, {widths.count(0)} removed")
    stored = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    before = sum(tensor.nbytes for tensor in AutoModelForCausalLM.from_pretrained(base_of(manifest)).parameters())
    assert found["size"] == f"{stored / 2**20:,.2f} MiB; {before / 2**20:,.2f} MiB before"
    assert found["layout"] == manifest.layout
    bits = stored_bits(checkpoint)
    weights = {4: "int4, symmetric, groups of 32", 8: "float8, symmetric, one scale per channel"}
    assert found["weights"] == (f"{weights[bits]}; the rest float32" if bits < 16 else "float32, not quantized")
    activations = "float8, symmetric, one scale per token; the rest float32"
    assert found["activations"] == (activations if bits == 8 else "not quantized")
    assert f"`base` with {removed} of the channels inside its experts removed" in text
    assert ("and the rest quantized" in text) == (bits < 16)


def test_names_the_gpu_that_float8_needs(checkpoint: Path) -> None:
    """And says that transformers does not quantize activations."""
    text, float8 = card(checkpoint), stored_bits(checkpoint) == 8
    assert ("compute capability 8.9 or newer" in text) == float8
    assert ("Activations are not quantized there" in text) == float8


def base_of(manifest: Manifest) -> str:
    return manifest.provenance["model"]


def test_says_how_it_was_made(checkpoint: Path) -> None:
    text, manifest = card(checkpoint), Manifest.from_checkpoint(checkpoint)
    assert manifest is not None
    for key in ("calibration_sha256", "torch_seed"):
        assert str(manifest.provenance[key]) in text
    for package, number in manifest.provenance["versions"].items():
        assert f"{package} {number}" in text
    made = text.partition("## How it was made")[2].partition("\n- ")[0]
    assert yaml.safe_load(made) == manifest.provenance["recipe"]
    for file in re.findall(r": `([\w.]+\.\w+)`$", text, re.MULTILINE):
        assert (checkpoint / file).is_file()


def test_its_code_runs(checkpoint: Path, qwen: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(checkpoint.parent)
    text = card(checkpoint)
    if not any(checkpoint.glob("tokenizer*")):
        assert "save that of the base model beside them" in text
        AutoTokenizer.from_pretrained(qwen).save_pretrained(checkpoint)
    exec(compile(code(text, "python"), CARD_NAME, "exec"), {})
    assert capsys.readouterr().out.split()


def test_the_licence_is_that_of_the_base(checkpoint: Path) -> None:
    assert "its card says `apache-2.0`" in card(checkpoint)


def test_without_a_card_beside_the_base_it_says_so(tmp_path: Path) -> None:
    prune(source(tmp_path / "base"), tmp_path / "out")
    text = card(tmp_path / "out")
    assert "license" not in front_matter(text)
    assert "No card beside its weights names one: add `license` and `base_model`" in text


@pytest.mark.parametrize(
    "text",
    ["", "no front matter", "---\n- a list\n---\n", "---\n{[\n---\n", "---\nlicense: {a: 1}\n---\n", "\0\xff"],
)
def test_a_card_of_a_base_without_metadata(tmp_path: Path, text: str) -> None:
    (tmp_path / CARD_NAME).write_text(text, encoding="latin-1")
    assert read_origin(str(tmp_path)) == Origin(tmp_path.name)


def cached(folder: Path, text: str) -> Path:
    """A model's card in the hub's cache."""
    snapshot = folder / "models--some--model-1b" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    (snapshot / CARD_NAME).write_text(text)
    return snapshot


def test_a_base_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert read_origin("some/model-1b") == Origin("some/model-1b", "some/model-1b")
    snapshot = cached(tmp_path, "---\nlicense: other\nlicense_name: theirs\nlicense_link: LICENSE\n---\n")
    link = "https://huggingface.co/some/model-1b/blob/main/LICENSE"
    inherited = {"license": "other", "license_name": "theirs", "license_link": link}
    for name in ("some/model-1b", str(snapshot)):
        assert read_origin(name) == Origin("some/model-1b", "some/model-1b", inherited)


def test_a_relative_link_of_a_base_without_a_name_is_left_out(tmp_path: Path) -> None:
    (tmp_path / CARD_NAME).write_text("---\nlicense: other\nlicense_link: LICENSE\n---\n")
    assert read_origin(str(tmp_path)).inherited == {"license": "other"}


@pytest.mark.parametrize("quantized", [False, True])
def test_a_base_on_the_hub_is_named_and_kept_when_saved_again(qwen: Path, tmp_path: Path, quantized: bool) -> None:
    """Saved, loaded and saved again: what an author wrote into the first card is kept."""
    prune(qwen, tmp_path / "out", quantize=quantized)
    text = card(tmp_path / "out")
    (tmp_path / "out" / CARD_NAME).write_text(text.replace("---\n", "---\nbase_model: some/model\n", 1))
    load(tmp_path / "out").save_pretrained(tmp_path / "again")
    found = front_matter(card(tmp_path / "again"))
    # no longer quantized
    assert (found["base_model"], found["base_model_relation"]) == ("some/model", "finetune")
    assert found["license"] == "apache-2.0"
    assert "`some/model` with" in card(tmp_path / "again")


def test_an_existing_card_is_left_unchanged(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / CARD_NAME).write_text("mine")
    manifest = Manifest.from_checkpoint(checkpoint)
    assert manifest is not None
    write_card(tmp_path, "name", manifest, {}, Origin(), quantized=False, loads_in_transformers=False)
    assert card(tmp_path) == "mine"


def test_untrusted_provenance_adds_no_markup(tmp_path: Path) -> None:
    provenance = {
        "model": ["a"],
        "torch_seed": "1\n# heading\n`<script>`",
        "calibration_batches": {"|": "]("},
        "versions": 3,
        "recipe": "```\n---\n",
        "recovery": [1, {"steps": 20, "text": "a|b", "held_out_loss": [2.5, 2.25]}, {"held_out_loss": "`"}],
    }
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    manifest = Manifest("ragged", 128, {"experts": [64, 0]}, 64, provenance)
    report = {"layers": {"a": 1}, "weight_bytes_before": "many"}
    write_card(tmp_path, "name", manifest, report, Origin(), quantized=False, loads_in_transformers=False)
    text = card(tmp_path)
    assert front_matter(text)["library_name"] == "vllm"
    assert "\n# heading" not in text
    assert "<script>" not in text
    assert "fine-tuned: 20 steps on ab, loss on held-out text 2.5000 before and 2.2500 after; then None" in text
    assert len(re.findall("^```", text, re.MULTILINE)) == 4
