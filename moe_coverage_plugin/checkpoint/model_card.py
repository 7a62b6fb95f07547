"""Writes the model card of a checkpoint: what was removed and how, what can open it, and the metadata for the hub."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData

from moe_coverage_plugin.checkpoint.left_out import LEFT_OUT_KEY
from moe_coverage_plugin.checkpoint.origin import CARD_NAME, TAG, Origin
from moe_coverage_plugin.expert_scheme import describe_numbers, quantized_groups
from moe_coverage_plugin.manifest import PICTURES_NAME, REPORT_NAME, SCORES_NAME, Manifest, report_layers

TEMPLATE = Path(__file__).with_name("templates") / "model_card.md"
RECIPE_NAME = "recipe.yaml"
# key of the provenance that lists fine-tuning runs
TRAINED_KEY = "recovery"
TAGS = ["moe", "pruning", "llm-compressor", "compressed-tensors", "vllm", TAG]


def write_card(
    directory: Path,
    title: str,
    manifest: Manifest,
    report: Mapping[str, Any],
    origin: Origin,
    quantized: bool,
    loads_in_transformers: bool,
    tokenizer: bool = False,
) -> None:
    """Write the card of a checkpoint from its other files; a card that is there already is left unchanged.

    Args:
        directory: has the weights and ``config.json``.
        title: name that the directory will have.
        manifest: widths of all experts.
        report: figures of the pruning.
        origin: the base model.
        quantized: the quantization in ``config.json`` is that of the weights. The file can also be inherited from a
            quantized checkpoint whose weights were decompressed.
        loads_in_transformers: stock transformers loads the checkpoint.
        tokenizer: the checkpoint will have a tokenizer.
    """
    path = directory / CARD_NAME
    if path.exists():
        return
    config = json.loads((directory / "config.json").read_text())
    groups = quantized_groups(config.get("quantization_config")) if quantized else []
    activations = [group["input_activations"] for group in groups if group.get("input_activations")]
    base = origin.name or Path(str(manifest.provenance.get("model") or "")).name or "a model without a name"
    picture = f"{PICTURES_NAME}/widths.png"
    recipe = manifest.provenance.get("recipe")
    licence = origin.inherited.get("license_name", origin.inherited.get("license"))
    card = ModelCard.from_template(
        _front_matter(origin, groups, loads_in_transformers),
        template_path=str(TEMPLATE),
        title=title,
        quoted=shlex.quote(title),
        path=json.dumps(title, ensure_ascii=False),
        base=_plain(base),
        picture=picture if (directory / picture).is_file() else None,
        layout=manifest.layout,
        dtype=config.get("dtype") or config.get("text_config", {}).get("dtype"),
        weights="; ".join(describe_numbers(group["weights"]) for group in groups),
        activations="; ".join(map(describe_numbers, activations)),
        float8_inputs=any((kind.get("num_bits"), kind.get("type")) == (8, "float") for kind in activations),
        loads_in_transformers=loads_in_transformers,
        own_code="auto_map" in config,
        tokenizer=tokenizer,
        left_out=_left_out(report),
        recipe=yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).rstrip() if recipe else "",
        made=_made(directory, manifest.provenance),
        licence=_plain(licence) if "license" in origin.inherited else None,
        on_hub=origin.base_model is not None,
        **_figures(directory, manifest, report),
    )
    card.save(path)


def _front_matter(origin: Origin, groups: list[Mapping[str, Any]], loads_in_transformers: bool) -> ModelCardData:
    bits = {f"{group['weights']['num_bits']}-bit" for group in groups if "num_bits" in group["weights"]}
    fields: dict[str, Any] = {
        # the hub shows code for this library
        "library_name": "transformers" if loads_in_transformers else "vllm",
        "tags": TAGS + sorted(bits),
        "pipeline_tag": "text-generation",
    }
    if origin.base_model is not None:
        # the hub has finetune, adapter, merge and quantized, but no relation for pruning
        fields["base_model"] = origin.base_model
        fields["base_model_relation"] = "quantized" if groups else "finetune"
    return ModelCardData(**fields | origin.inherited)


def _figures(directory: Path, manifest: Manifest, report: Mapping[str, Any]) -> dict[str, Any]:
    widths = [width for layer in manifest.widths.values() for width in layer]
    kept_experts = len(widths) - widths.count(0)
    channels = len(widths) * manifest.intermediate_size
    size_before = report.get("weight_bytes_before")
    layers = report_layers(report).values()
    shares = [share for layer in layers if type(share := layer.get("coverage")) is float]
    return {
        "channels": f"{sum(widths):,} of {channels:,}",
        "removed_share": f"{1 - sum(widths) / channels:.1%}",
        "widths": f"{min(filter(None, widths))} to {max(widths)}, mean {sum(widths) / len(widths):.0f}",
        "intermediate_size": manifest.intermediate_size,
        "block_size": manifest.block_size,
        "experts": f"{kept_experts} of {len(widths)}",
        "removed_experts": widths.count(0),
        "size": _mebibytes(sum(file.stat().st_size for file in directory.glob("*.safetensors"))),
        "size_before": _mebibytes(size_before) if type(size_before) is int else None,
        "coverage": f"{min(shares):.1%} to {max(shares):.1%}" if shares and len(shares) == len(layers) else None,
    }


def _left_out(report: Mapping[str, Any]) -> str | None:
    """Describe the layers that were not saved; the report of an untrusted checkpoint can hold anything."""
    found = report.get(LEFT_OUT_KEY)
    if not isinstance(found, Mapping):
        return None
    tensors, size = found.get("tensors"), found.get("size")
    if type(tensors) is int and tensors > 0 and type(size) is int:
        return f"{tensors:,} tensors, {_mebibytes(size)}"
    return "none in the files of the base model"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.2f} MiB"


def _made(directory: Path, provenance: Mapping[str, Any]) -> dict[str, str]:
    """Return how the checkpoint was made; the provenance of an untrusted checkpoint can hold anything."""
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
    if runs := [_training(run) for run in trained if isinstance(run, Mapping)] if isinstance(trained, list) else []:
        made["fine-tuned"] = "; then ".join(runs)
    files = {
        "complete recipe, with quantizers": RECIPE_NAME,
        "widths, coverage and calibration tokens of every expert": REPORT_NAME,
        "scores, from which widths can be planned again": SCORES_NAME,
    }
    return made | {name: f"`{file}`" for name, file in files.items() if (directory / file).is_file()}


def _training(run: Mapping[str, Any]) -> str:
    text = f"{_plain(run.get('steps'))} steps on {_plain(run.get('text'))}"
    match run.get("held_out_loss"):
        case [float(before), float(after)]:
            return f"{text}, loss on held-out text {before:.4f} before and {after:.4f} after"
    return text


def _plain(value: Any) -> str:
    """Return a value as one line of text without markup."""
    return re.sub(r"[`|<>\[\]\\]", "", " ".join(str(value).split()))
