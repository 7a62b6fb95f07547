"""Writes the config of the model that is saved, in the spelling of the file that the model was loaded from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from loguru import logger
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PretrainedConfig, PreTrainedModel

from moe_coverage_plugin.checkpoint.left_out import source_file
from moe_coverage_plugin.files.mtp import without_mtp
from moe_coverage_plugin.manifest import CONFIG_KEY, read_json

CONFIG_NAME = "config.json"
QUANTIZATION_KEY = "quantization_config"
DTYPE_KEYS = ("dtype", "torch_dtype")
# describe a file or an object, not the model, or are set below
IGNORED = {QUANTIZATION_KEY, CONFIG_KEY, "transformers_version", *DTYPE_KEYS}
# a choice of the process; the mark of causal_mask.py is under this name, too
RUNTIME = {"attn_implementation"}
# spellings of earlier releases of transformers that would contradict a changed field
FORMER = {"rope_parameters": ("rope_theta", "rope_scaling")}
_MISSING = object()


def write_config(model: PreTrainedModel, directory: Path) -> None:
    """Replace the config that transformers wrote into a directory.

    Engines always read the file that came with a model, and sometimes not that of transformers. So a field that is
    unchanged since the model was loaded is copied from that file, as are fields that transformers does not have.
    Changed fields are those of the model. Layers that predict several tokens are not saved, so none are counted.

    Args:
        model: the model whose weights are in the directory.
        directory: has the ``config.json`` of transformers, with the toolkit's ``quantization_config``.
    """
    path = directory / CONFIG_NAME
    written = json.loads(path.read_text())
    quantization = written.pop(QUANTIZATION_KEY, None)
    for part in (written, written.get("text_config") or {}):
        for key in RUNTIME:
            part.pop(key, None)
    config = without_mtp(_in_the_spelling_of_the_source(model, written) or written)
    config.pop(CONFIG_KEY, None)
    _set_dtype(config, _name(stored_dtype(model)))
    if "transformers_version" in written:
        config["transformers_version"] = written["transformers_version"]
    if quantization is not None:
        config[QUANTIZATION_KEY] = quantization
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def stored_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of most floating-point weights, of those with more than one byte if there are any."""
    sizes: Counter[torch.dtype] = Counter()
    with disable_onloading():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.itemsize > 1:
                sizes[parameter.dtype] += parameter.numel()
    return max(sizes, key=sizes.__getitem__) if sizes else model.dtype


def _in_the_spelling_of_the_source(model: PreTrainedModel, written: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config of the model written as its source wrote it; ``None`` without a source that can be used."""
    file = source_file(model, CONFIG_NAME)
    if file is None:
        return None
    try:
        source = {key: value for key, value in read_json(file).items() if key not in IGNORED - set(DTYPE_KEYS)}
        kind = str(source.get("model_type"))
        # a class of code beside the weights is not in the mapping
        own = kind == model.config.model_type or kind not in CONFIG_MAPPING
        before = (type(model.config) if own else CONFIG_MAPPING[kind]).from_dict(deepcopy(source))
    except Exception as error:  # the class of a family's config may raise anything at the content of the file
        logger.warning(f"{file} cannot be read again ({error}): the config is written as transformers spells it")
        return None
    if type(before) is type(model.config):
        return _edited(source, before, model.config, written)
    nested = source.get("text_config")
    if not isinstance(nested, Mapping) or type(before.get_text_config()) is not type(model.config):
        return None
    # the text part of a multimodal model, saved under the names of the multimodal model
    part = {key: value for key, value in written.items() if key != "architectures"}
    text_config = _edited(dict(nested), before.get_text_config(), model.config, part)
    whole: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(before), None)
    named = {} if whole is None or source.get("architectures") else {"architectures": [whole.__name__]}
    return source | named | {"text_config": text_config}


def _edited(
    source: dict[str, Any], before: PretrainedConfig, now: PretrainedConfig, written: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the source with what was changed since it was read.

    Args:
        source: content of the file.
        before: the config that it describes.
        now: the config of the model.
        written: how transformers wrote ``now``; returned if the edited source would be read as another config.
    """
    edited = _merge(source, before.to_dict(), now.to_dict())
    if written.get("architectures"):
        edited["architectures"] = written["architectures"]
    try:
        read_again = type(now).from_dict(deepcopy(edited)).to_dict()
    except Exception:  # as above
        return dict(written)
    return edited if _comparable(read_again) == _comparable(now.to_dict()) else dict(written)


def _merge(text: Mapping[str, Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(text)
    for key in before.keys() | now.keys():
        old, new = before.get(key, _MISSING), now.get(key, _MISSING)
        if key in IGNORED | RUNTIME or key == "architectures" or str(key).startswith("_") or new == old:
            continue
        for former in FORMER.get(key, ()):
            result.pop(former, None)
        nested = result.get(key)
        if new is _MISSING:
            result.pop(key, None)
        elif str(key).endswith("_config") and all(isinstance(each, Mapping) for each in (old, new, nested)):
            result[key] = _merge(nested, old, new)  # type: ignore[arg-type]
        else:
            result[key] = new
    return result


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that describe the model, in configs nested in it as well."""
    return {
        key: _comparable(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in IGNORED | RUNTIME and key != "architectures" and not str(key).startswith("_")
    }


def _set_dtype(config: dict[str, Any], name: str) -> None:
    """Write a dtype where the config has one, in configs nested in it as well, and at its top level."""
    config["dtype"] = name
    parts = [config]
    while parts:
        part = parts.pop()
        for key in DTYPE_KEYS:
            if key in part:
                part[key] = name
        parts += [value for key, value in part.items() if key.endswith("_config") and isinstance(value, dict)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
