"""The model card beside a checkpoint: what was removed and how, who can open it, and what the hub needs to know."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.repocard import metadata_load
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from moe_coverage_plugin.files.tokenizer import has_tokenizer
from moe_coverage_plugin.manifest import REPORT_NAME, SCORES_NAME, Manifest, report_layers

CARD_NAME = "README.md"
TAG = "moe-coverage"
RECIPE_NAME = "recipe.yaml"
# of the provenance, where a model that was fine-tuned tells so
TRAINED_KEY = "recovery"
# what a pruned model inherits from the card of its base
INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
HUB = "https://huggingface.co"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)


@dataclass(frozen=True)
class Origin:
    """What the card of the model says that was pruned.

    Attributes:
        name: of the model that was pruned, on the hub or of its directory; empty where that is not known.
        base_model: its name on the hub; ``None`` where it came from a directory that does not tell.
        inherited: fields of the front matter that hold for the pruned model, too.
    """

    name: str = ""
    base_model: str | None = None
    inherited: dict[str, Any] = field(default_factory=dict)


def read_origin(source: str) -> Origin:
    """Look for a model's card beside its weights, in the directory or in the hub's cache; never on the hub.

    Of a checkpoint that was pruned before, its base is the base.

    Args:
        source: directory or name on the hub, as ``model.name_or_path`` says it; empty for a model never on disk.
    """
    directory = Path(source)
    if source and directory.is_dir():
        front_matter = _front_matter(directory / CARD_NAME)
        pruned = TAG in _strings(front_matter.get("tags"))
        told = front_matter.get("base_model") if pruned else _cached_name(directory)
        base_model = told if isinstance(told, str) else None
        name = base_model or ("" if pruned else directory.absolute().name)
    elif HUB_ID.fullmatch(source):
        cached = try_to_load_from_cache(source, CARD_NAME)
        front_matter = _front_matter(Path(cached)) if isinstance(cached, str) else {}
        name = base_model = source
    else:
        return Origin()
    inherited = {key: front_matter[key] for key in INHERITED if _strings(front_matter.get(key))}
    if "license_link" in inherited and not str(inherited["license_link"]).startswith("https://"):
        # the link of a file beside the base's card
        link = inherited.pop("license_link")
        if base_model is not None:
            inherited["license_link"] = f"{HUB}/{base_model}/blob/main/{link}"
    return Origin(name, base_model, inherited)


def _front_matter(card: Path) -> dict[str, Any]:
    try:
        found = metadata_load(card) if card.is_file() else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        # somebody else's file: a card that cannot be read says nothing
        found = None
    return found if isinstance(found, dict) else {}


def _cached_name(directory: Path) -> str | None:
    """The name on the hub of a snapshot in its cache."""
    names = (CACHED.fullmatch(part) for part in directory.absolute().parts)
    return next((f"{found[1]}/{found[2]}" for found in names if found), None)


def _strings(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return values if all(isinstance(each, str) for each in values) else []


def write_card(
    directory: Path,
    title: str,
    manifest: Manifest,
    report: Mapping[str, Any],
    origin: Origin,
    quantized: bool,
    open_to_all: bool,
) -> None:
    """Write the card of a checkpoint from what its other files say. One that is there already is left alone.

    Args:
        directory: with weights and ``config.json`` in it.
        title: name of the directory that they will be found in.
        report: figures of the pruning.
        quantized: what ``config.json`` says of quantization is about these weights.
        open_to_all: stock transformers can load it.
    """
    path = directory / CARD_NAME
    if path.exists():
        return
    config = json.loads((directory / "config.json").read_text())
    # the file may still be that of a model that was decompressed since
    schemes = _schemes(config) if quantized else []
    base = origin.name or Path(str(manifest.provenance.get("model") or "")).name or "a model without a name"
    picture = "moe_coverage_report/widths.png"
    card = _TEMPLATES.get_template("model_card.md").render(
        front_matter=yaml.safe_dump(
            _own_front_matter(origin, schemes, open_to_all), sort_keys=False, allow_unicode=True
        ).rstrip(),
        title=title,
        quoted=shlex.quote(title),
        path=json.dumps(title, ensure_ascii=False),
        summary=_summary(manifest, _plain(base), schemes),
        picture=picture if (directory / picture).is_file() else None,
        facts=_facts(directory, manifest, report, config, schemes),
        engines=_engines(manifest, schemes, open_to_all),
        opened=_opened(manifest, schemes, open_to_all),
        own_code="auto_map" in config,
        tokenizer=has_tokenizer(directory),
        recipe=_recipe(manifest.provenance.get("recipe")),
        origin=_made(directory, manifest.provenance),
        licence=_licence(origin),
    )
    path.write_text(card, encoding="utf-8")


def _own_front_matter(origin: Origin, schemes: list[dict[str, Any]], open_to_all: bool) -> dict[str, Any]:
    base: dict[str, Any] = {}
    if origin.base_model is not None:
        # the hub knows finetune, adapter, merge and quantized: a pruned model's weights are changed ones of the base
        base = {"base_model": origin.base_model, "base_model_relation": "quantized" if schemes else "finetune"}
    tags = ["moe", "pruning", "llm-compressor", "compressed-tensors", "vllm", TAG]
    bits = sorted({f"{scheme['weights']['num_bits']}-bit" for scheme in schemes if "num_bits" in scheme["weights"]})
    # the hub shows code of the library that it names, and transformers alone cannot open every layout
    library = "transformers" if open_to_all else "vllm"
    return (
        base | {"library_name": library, "tags": tags + bits} | {"pipeline_tag": "text-generation"} | origin.inherited
    )


def _schemes(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """How weights, and what they are multiplied with, are quantized, as compressed-tensors describes it."""
    groups = (config.get("quantization_config") or {}).get("config_groups") or {}
    return [group for group in groups.values() if group.get("weights")]


def _activations(schemes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [scheme["input_activations"] for scheme in schemes if scheme.get("input_activations")]


def _summary(manifest: Manifest, base: str, schemes: list[dict[str, Any]]) -> str:
    widths = [width for layer in manifest.widths.values() for width in layer]
    removed = 1 - sum(widths) / (len(widths) * manifest.intermediate_size)
    then = f", and what is left quantized ({_told(schemes)})" if schemes else ""
    ragged = " Every expert has a width of its own." if manifest.layout == "ragged" else ""
    return f"`{base}` with {removed:.1%} of the channels inside its experts removed{then}.{ragged}"


def _told(schemes: list[dict[str, Any]]) -> str:
    return "; ".join(_numbers(scheme["weights"]) for scheme in schemes)


def _numbers(kind: Mapping[str, Any]) -> str:
    group_size = kind.get("group_size")
    shared = f"groups of {group_size}" if kind.get("strategy") == "group" else f"by {kind.get('strategy')}"
    return f"{kind.get('num_bits')} bits, {kind.get('type')}, {shared}"


def _facts(
    directory: Path,
    manifest: Manifest,
    report: Mapping[str, Any],
    config: Mapping[str, Any],
    schemes: list[dict[str, Any]],
) -> dict[str, str]:
    widths = [width for layer in manifest.widths.values() for width in layer]
    live = [width for width in widths if width]
    channels, dead = len(widths) * manifest.intermediate_size, len(widths) - len(live)
    dtype = config.get("dtype") or config.get("text_config", {}).get("dtype")
    activations = "; ".join(map(_numbers, _activations(schemes)))
    facts = {
        "expert channels": f"{sum(widths):,} of {channels:,} kept, {1 - sum(widths) / channels:.1%} removed",
        "width of an expert": f"{min(live)} to {max(live)}, mean {sum(widths) / len(widths):.0f}, "
        f"{manifest.intermediate_size} before; multiples of {manifest.block_size}",
        "experts": f"{len(live)} of {len(widths)} live, {dead} removed whole and masked in the router",
        "weights": f"{_told(schemes)}; the rest {dtype}" if schemes else f"{dtype}, not quantized",
        "activations": f"{activations}; the rest {dtype}" if activations else "not quantized",
        "size": _mebibytes(sum(file.stat().st_size for file in directory.glob("*.safetensors"))),
        "layout": manifest.layout,
    }
    if type(before := report.get("weight_bytes_before")) is int:
        facts["size"] += f"; {_mebibytes(before)} before"
    kept = [layer.get("coverage") for layer in report_layers(report).values()]
    if kept and all(type(share) is float for share in kept):
        facts["channel scores kept"] = f"{min(kept):.1%} to {max(kept):.1%} of a layer's"
    return facts


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


def _engines(manifest: Manifest, schemes: list[dict[str, Any]], open_to_all: bool) -> str:
    found = "vLLM finds the plugin by itself, no flag is needed."
    if manifest.layout == "ragged":
        found += " Without it, engines stop with an error."
    elif open_to_all:
        found += " All experts have one width: engines load it without the plugin, too."
    elif schemes:
        found += " All experts have one width: vLLM loads it without the plugin, where it has kernels for it."
    if any((kind.get("num_bits"), kind.get("type")) == (8, "float") for kind in _activations(schemes)):
        found += " To be fast, the model needs a card that multiplies 8-bit floats: compute capability 8.9 or newer."
    return found


def _opened(manifest: Manifest, schemes: list[dict[str, Any]], open_to_all: bool) -> str:
    dense = " Quantized weights are decompressed." if schemes else ""
    if _activations(schemes):
        dense += " Activations are not quantized there, as they are by engines."
    text = f"The model can be run, fine-tuned, saved and quantized again.{dense}"
    if manifest.layout == "ragged":
        return f"{text} transformers alone stops with an error."
    return f"{text} AutoModelForCausalLM opens it as well." if open_to_all else text


def _recipe(recipe: Any) -> str:
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).rstrip() if recipe else ""


def _made(directory: Path, provenance: Mapping[str, Any]) -> dict[str, str]:
    """Where it came from, as far as it is known: a checkpoint of somebody else may say anything, or nothing."""
    beside = {
        "the whole recipe, quantizers included": RECIPE_NAME,
        "widths, coverage and calibration tokens of every expert": REPORT_NAME,
        "scores, to plan again from": SCORES_NAME,
    }
    known = {
        "calibration": ("calibration_batches", "{} batches"),
        "sha256 of the calibration tokens": ("calibration_sha256", "`{}`"),
        "seed": ("torch_seed", "{}"),
    }
    made = {
        name: text.format(_plain(provenance[key]))
        for name, (key, text) in known.items()
        if provenance.get(key) is not None
    }
    if isinstance(versions := provenance.get("versions"), Mapping):
        made["versions"] = ", ".join(f"{_plain(name)} {_plain(number)}" for name, number in versions.items())
    trained = provenance.get(TRAINED_KEY)
    runs = [_training(run) for run in trained if isinstance(run, Mapping)] if isinstance(trained, list) else []
    made |= {"fine-tuned": "; then ".join(runs)} if runs else {}
    return made | {name: f"`{file}`" for name, file in beside.items() if (directory / file).is_file()}


def _training(run: Mapping[str, Any]) -> str:
    text = f"{_plain(run.get('steps'))} steps on {_plain(run.get('text'))}"
    match run.get("held_out_loss"):
        case [float(before), float(after)]:
            return f"{text}, loss on held-out text {before:.4f} before and {after:.4f} after"
    return text


def _licence(origin: Origin) -> str:
    if licence := origin.inherited.get("license"):
        named = _plain(origin.inherited.get("license_name", licence))
        return f"That of the base model, of which the card says `{named}`."
    missing = "`license`" if origin.base_model is not None else "`license` and `base_model`"
    advice = f"add {missing} at the top of this file before uploading"
    return f"That of the base model. No card beside it named one: {advice}."


def _plain(value: Any) -> str:
    """A value as words of one line that no markup begins in."""
    return re.sub(r"[`|<>\[\]\\]", "", " ".join(str(value).split()))
