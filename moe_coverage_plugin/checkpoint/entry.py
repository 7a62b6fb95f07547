"""Writes the manifest into ``config.json``, so that stock programs load a checkpoint correctly or stop."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from moe_coverage_plugin.expert_scheme import WIDTH_KEYS
from moe_coverage_plugin.files.atomic import write_atomically
from moe_coverage_plugin.files.record import record_contents
from moe_coverage_plugin.manifest import CONFIG_KEY, LOADER, LOADER_KEY, PLUGIN, Layout, Manifest

UNQUANTIZED = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}


def loads_in_transformers(layout: Layout, quantized: bool, single_experts: bool) -> bool:
    """Return whether stock transformers loads a checkpoint.

    Args:
        layout: how experts are stored.
        quantized: some weights are quantized, which transformers decompresses for some families only.
        single_experts: transformers looks for single experts of this family, as our checkpoints have them.
    """
    return layout != "ragged" and not quantized and single_experts


def write_entry(directory: Path, manifest: Manifest, quantized: bool, single_experts: bool = True) -> None:
    """Add the manifest to ``config.json``, and make stock programs load the weights or stop.

    A ragged checkpoint names the plugin as its quantization method, and its loader as the implementation of experts:
    the error of a stock engine, or of stock transformers, then says what is missing. The declared width is a second
    barrier.

    The toolkit writes the file from that of the source model, so this must run after it. The file is replaced
    atomically.

    Args:
        directory: the checkpoint.
        manifest: widths of all experts.
        quantized: some weights are quantized.
        single_experts: stock transformers looks for single experts of this family. For other families it would start
            with random ones, so the implementation of experts stops it.
    """
    path = directory / "config.json"
    config = json.loads(path.read_text())
    # a file inherited from the source model can have a quantization or a manifest that is not of these weights
    quantization = config.pop("quantization_config", None) if quantized else dict(UNQUANTIZED)
    config.pop(CONFIG_KEY, None)
    text_config = config.get("text_config", config)
    width_key = next(key for key in WIDTH_KEYS if key in text_config)
    text_config[width_key] = manifest.declared_width
    ragged = manifest.layout == "ragged"
    if ragged or not single_experts:
        # patch: experts-implementation
        config[LOADER_KEY] = LOADER
    # transformers opens no quantization_config that quantizes nothing
    if not (at_top := not ragged and not quantized):
        assert quantization is not None, "the toolkit describes what it quantized"
        config["quantization_config"] = quantization | ({"quant_method": PLUGIN} if ragged else {})
    # last, because the entry records the config as well
    manifest = replace(manifest, contents=record_contents(directory, manifest, config))
    (config if at_top else config["quantization_config"])[CONFIG_KEY] = manifest.to_entry()
    write_atomically(path, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
