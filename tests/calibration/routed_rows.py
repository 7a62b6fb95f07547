"""Rows that the experts of a layer see, by loops over the tokens of a plain forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_coverage_plugin.calibration.layer_inputs import LayerInputs
from moe_coverage_plugin.modeling.moe_layers import MoELayer, find_moe_layers


class Row(NamedTuple):
    """One token of one expert.

    Attributes:
        batch: number of its batch.
        held: whether it is held back.
        x_H: input of the expert.
        weight: routing weight.
        a_I: activation.
        z_H: output of the expert, before the routing weight.
    """

    batch: int
    held: bool
    x_H: Tensor
    weight: Tensor
    a_I: Tensor
    z_H: Tensor


@torch.no_grad()
def rows_of(model: Any, batches: Sequence[dict[str, Tensor]], held: Sequence[Tensor]) -> list[list[list[Row]]]:
    """For each layer and expert its rows of real tokens, in the order of batches and tokens.

    Args:
        model: with experts as linear modules.
        batches: of model inputs.
        held: for each batch the flags ``[T]`` of tokens that are held back.
    """
    layers = find_moe_layers(model)
    found: list[list[list[Row]]] = [[[] for _ in layer.mlps] for layer in layers]
    for number, (batch, held_T) in enumerate(zip(batches, held, strict=True)):
        real_T = batch["attention_mask"].flatten().bool()

        def collect(layer: MoELayer, rows: list[list[Row]], args: tuple, number=number, held_T=held_T, real_T=real_T):
            hidden_TH, ids_TK, weights_TK = args
            for token in real_T.nonzero().flatten().tolist():
                for expert, weight in zip(ids_TK[token].tolist(), weights_TK[token], strict=True):
                    mlp: Any = layer.mlps[expert]
                    x_H = hidden_TH[token]
                    h_O = torch.cat([mlp.gate_proj(x_H), mlp.up_proj(x_H)])
                    a_I = layer.experts._apply_gate(h_O)
                    rows[expert].append(Row(number, bool(held_T[token]), x_H, weight, a_I, mlp.down_proj(a_I)))

        handles = [
            layer.experts.register_forward_pre_hook(
                lambda _module, args, layer=layer, rows=rows, collect=collect: collect(layer, rows, args)
            )
            for layer, rows in zip(layers, found, strict=True)
        ]
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def inputs_of(
    model: Any, layer: MoELayer, batches: Sequence[dict[str, Tensor]], held: Sequence[Tensor]
) -> LayerInputs:
    """The inputs of a layer's experts in the model's own forward, with the given flags of held-back tokens."""
    masks = [batch["attention_mask"].flatten().bool().to(model.device) for batch in batches]
    inputs = LayerInputs(layer.num_experts, int(sum(mask.sum() for mask in masks)), torch.device("cpu"))
    flags = [each.to(model.device) for each in held]
    for batch, held_T, real_T in zip(batches, flags, masks, strict=True):
        handle = layer.experts.register_forward_pre_hook(
            lambda _module, args, held_T=held_T, real_T=real_T: inputs.add(*args, held_T, real_T)
        )
        model(**{name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")})
        handle.remove()
    return inputs
