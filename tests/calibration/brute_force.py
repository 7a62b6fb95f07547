"""Reference for observation: scores from a plain forward pass of the stock model and loops over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import linearize_moe
from torch import Tensor
from torch.nn.functional import cross_entropy, silu
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_coverage_plugin import AttributionModifier
from moe_coverage_plugin.core.scores import AttributionScores
from tests.tiny import save_model, token_batches

LAYERS, EXPERTS, CHANNELS, TOP_K, HIDDEN = 2, 8, 64, 2, 128
FIELDS = ("channels_LEI", "first_order_LE", "second_order_LE", "tokens_LE", "routing_weight_sum_LE")


def save_float64(directory: Path, family: str, **config: Any) -> Path:
    """Save a model of two layers in float64, so that the order of sums changes results by at most 1e-12."""
    shape = {"num_hidden_layers": LAYERS, "moe_intermediate_size": CHANNELS}
    return save_model(directory, family, torch.float64, **shape | config)


def open_stock(source: Path, linear: bool = False) -> PreTrainedModel:
    """Open the model with transformers; with ``linear``, replace experts by linear layers as ``oneshot`` does."""
    model = AutoModelForCausalLM.from_pretrained(source, experts_implementation="eager")
    if linear:
        linearize_moe(model)
    return model.eval()


def observe(source: Path, dataset: Any = None, attribution: dict[str, Any] | None = None, **run: Any):
    """Scores of a ``oneshot`` run that only observes."""
    modifier = AttributionModifier(**{"channel_metric": "activation"} | (attribution or {}))
    dataset = token_batches(samples=6, length=20) if dataset is None else dataset
    oneshot(model=str(source), dataset=dataset, recipe=[modifier], **{"shuffle_calibration_samples": False} | run)
    return modifier.measured


def padded_with_prompts(labelled: bool) -> Dataset:
    """Samples with padding on the right, and if ``labelled``, with labels that mask the first tokens of each."""
    dataset = token_batches(samples=4, length=20, padded=True)
    if not labelled:
        return dataset
    labels = []
    for number, sample in enumerate(dataset):
        pairs = zip(sample["input_ids"], sample["attention_mask"], strict=True)
        labels.append([token if mask and index > number else -100 for index, (token, mask) in enumerate(pairs)])
    return dataset.add_column("labels", labels)


def rows(dataset: Dataset) -> list[dict[str, Tensor]]:
    """The samples of a data set as batches of one sample."""
    return [{key: torch.tensor([sample[key]]) for key in ("input_ids", "attention_mask")} for sample in dataset]


def masked_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    target = batch.get("labels", batch["input_ids"]).masked_fill(batch["attention_mask"] == 0, -100)[:, 1:]
    return cross_entropy(logits.flatten(0, 1).double(), target.flatten(), ignore_index=-100, reduction="sum")


def batches_of(dataset: Dataset, size: int) -> list[dict[str, Tensor]]:
    columns = {name: torch.tensor(dataset[:][name]) for name in dataset.column_names}
    return [
        {name: column[start : start + size] for name, column in columns.items()}
        for start in range(0, len(dataset), size)
    ]


@torch.no_grad()
def statistics(model: PreTrainedModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over the real tokens of a batch: squares of channels and inputs, tokens, routing weights, and importances.

    For the second order, the layer runs again with the weights of one expert's down projection set to zero.
    """
    captured: list[dict[str, Tensor]] = [{} for _ in range(LAYERS)]
    handles = []
    for index, decoder in enumerate(model.model.layers):
        seen = captured[index]

        def on_layer(_m, args, output, seen=seen):
            seen["layer_input"] = args[0]
            seen["y"] = (output[0] if isinstance(output, tuple) else output).reshape(-1, HIDDEN)

        def on_experts(_m, args, seen=seen):
            seen["x"], seen["ids"], seen["routing_weights"] = args[0].reshape(-1, HIDDEN), args[1], args[2].double()

        handles += [
            decoder.mlp.register_forward_hook(on_layer),
            decoder.mlp.experts.register_forward_pre_hook(on_experts),
        ]
    model(**batch)
    for handle in handles:
        handle.remove()
    real = batch["attention_mask"].flatten().bool().tolist()
    sums = {
        "squares_LEI": torch.zeros(LAYERS, EXPERTS, CHANNELS, dtype=torch.float64),
        "inputs_LEH": torch.zeros(LAYERS, EXPERTS, HIDDEN, dtype=torch.float64),
        "first_order_LE": torch.zeros(LAYERS, EXPERTS, dtype=torch.float64),
        "second_order_LE": torch.zeros(LAYERS, EXPERTS, dtype=torch.float64),
        "tokens_LE": torch.zeros(LAYERS, EXPERTS, dtype=torch.int64),
        "routing_weight_sum_LE": torch.zeros(LAYERS, EXPERTS, dtype=torch.float64),
    }
    for index, seen in enumerate(captured):
        layer = model.model.layers[index].mlp
        for token, is_real in enumerate(real):
            if not is_real:
                continue
            x_H, y_H = seen["x"][token], seen["y"][token]
            for slot in range(TOP_K):
                expert, routing_weight = int(seen["ids"][token, slot]), seen["routing_weights"][token, slot]
                gate_up = layer.experts.gate_up_proj[expert] @ x_H
                activation_I = silu(gate_up[:CHANNELS]) * gate_up[CHANNELS:]
                z_H = layer.experts.down_proj[expert] @ activation_I
                sums["squares_LEI"][index, expert] += activation_I**2
                sums["inputs_LEH"][index, expert] += x_H**2
                sums["first_order_LE"][index, expert] += routing_weight * (z_H @ y_H) / (y_H @ y_H)
                sums["tokens_LE"][index, expert] += 1
                sums["routing_weight_sum_LE"][index, expert] += routing_weight
        for expert in range(EXPERTS):
            down_HI = layer.experts.down_proj[expert].clone()
            layer.experts.down_proj[expert] = 0
            ablated = layer(seen["layer_input"])
            ablated = (ablated[0] if isinstance(ablated, tuple) else ablated).reshape(-1, HIDDEN)
            layer.experts.down_proj[expert] = down_HI
            loss = (ablated - seen["y"]).square().sum(-1) / seen["y"].square().sum(-1)
            sums["second_order_LE"][index, expert] = loss[torch.tensor(real)].sum()
    return sums


def channel_scores(model: PreTrainedModel, metric: str, sums: dict[str, Tensor]) -> Tensor:
    """Channel scores ``[L, E, I]`` of a metric from the sums over all batches, computed channel by channel."""
    scores = torch.zeros(LAYERS, EXPERTS, CHANNELS, dtype=torch.float64)
    for layer in range(LAYERS):
        experts = model.model.layers[layer].mlp.experts
        for expert in range(EXPERTS):
            norms_I = sums["squares_LEI"][layer, expert].sqrt()
            norms_H = sums["inputs_LEH"][layer, expert].sqrt()
            for channel in range(CHANNELS):
                gate_H = experts.gate_up_proj[expert, channel]
                up_H = experts.gate_up_proj[expert, CHANNELS + channel]
                down_H = experts.down_proj[expert, :, channel]
                if metric == "activation":
                    score = norms_I[channel]
                elif metric == "weight":
                    score = (gate_H.norm() + up_H.norm() + down_H.norm()) / 3
                else:
                    from_input = (gate_H.abs() * norms_H).sum() + (up_H.abs() * norms_H).sum()
                    score = (down_H.abs().sum() * norms_I[channel] + from_input) / 3
                scores[layer, expert, channel] = score
    return scores


def expected(model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], metric: str = "activation") -> Any:
    """All fields of the scores, summed over batches."""
    parts = [statistics(model, batch) for batch in batches]
    sums = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    return sums | {"channels_LEI": channel_scores(model, metric, sums)}


def assert_scores(scores: AttributionScores, reference: dict[str, Tensor]) -> None:
    """Compare all fields, and numbers of tokens exactly."""
    for name in FIELDS:
        torch.testing.assert_close(getattr(scores, name), reference[name], rtol=1e-5, atol=1e-12, msg=name)
    assert torch.equal(scores.tokens_LE, reference["tokens_LE"])
