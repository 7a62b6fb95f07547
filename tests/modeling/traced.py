"""A pass of llm-compressor's sequential pipeline, without its modifiers."""

from __future__ import annotations

from typing import Any

import torch
from llmcompressor.pipelines.sequential.helpers import Subgraph, trace_subgraphs
from llmcompressor.utils.helpers import calibration_forward_context
from torch import Tensor


def _sample(ids_BS: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids_BS, "attention_mask": torch.ones_like(ids_BS)}


def subgraphs(model: Any, ids_BS: Tensor) -> list[Subgraph]:
    """The model in parts, one for each decoder layer."""
    return trace_subgraphs(model, _sample(ids_BS), [type(model.model.layers[-1]).__name__], [], 1)


def hidden_states(model: Any, parts: list[Subgraph], ids_BS: Tensor) -> Tensor:
    """The output of the last decoder layer, ``[B, S, H]``."""
    kept: list[Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda _m, _a, out: kept.append(out[0] if isinstance(out, tuple) else out)
    )
    with calibration_forward_context(model):
        values = _sample(ids_BS)
        for part in parts:
            values |= part.forward(model, **{name: values[name] for name in part.input_names}) or {}
    handle.remove()
    return kept[0]
