"""Names of layers that predict several tokens (MTP), which transformers does not load and checkpoints leave out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# fields of configs that count such layers, by family
COUNT_KEYS = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_layers",
    "mtp_num_layers",
    "num_mtp_modules",
)
SWITCH_KEYS = ("use_mtp",)
# mtp.fc, model.mtp.layers.0, model.mtp_layers.0, model.mtp_block.0
NAMED = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")
# other families number them after the layers of the model; layers of an image tower have other prefixes
NUMBERED = re.compile(r"(?:model\.|language_model\.)*layers\.(\d+)\.")


def is_mtp_name(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor is of a layer that predicts several tokens, which is not part of the model itself.

    Args:
        name: of the tensor in the file.
        config: content of ``config.json`` beside the file, which may be from an untrusted source.
    """
    if NAMED.search(name):
        return True
    numbered = NUMBERED.match(name)
    if numbered is None:
        return False
    nested = config.get("text_config")
    text_config = nested if isinstance(nested, Mapping) else config
    layers = text_config.get("num_hidden_layers")
    if type(layers) is not int:
        return False
    # a number of many digits is slow to read
    return len(numbered[1]) < 10 and layers <= int(numbered[1]) < layers + mtp_layers(text_config)


def mtp_layers(config: Mapping[str, Any]) -> int:
    """Return how many layers that predict several tokens a config counts, in any of its parts."""
    most, parts = 0, [config]
    while parts:
        part = parts.pop()
        most = max([most, *(value for key in COUNT_KEYS if type(value := part.get(key)) is int)])
        parts += [value for value in part.values() if isinstance(value, Mapping)]
    return most


def without_mtp(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that counts no layers that predict several tokens, in any of its parts."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            changed[key] = without_mtp(value)
        elif key in COUNT_KEYS and type(value) is int:
            changed[key] = 0
        else:
            changed[key] = False if key in SWITCH_KEYS and value is True else value
    return changed
