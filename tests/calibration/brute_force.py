"""What observation must find, computed from a plain forward pass of the stock model with loops of its own."""

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
    """A model of two layers in float64, where sums in another order agree to twelve digits."""
    shape = {"num_hidden_layers": LAYERS, "moe_intermediate_size": CHANNELS}
    return save_model(directory, family, torch.float64, **shape | config)


def open_stock(source: Path, linear: bool = False) -> PreTrainedModel:
    """The model as transformers opens it; ``linear``: with its experts as ``oneshot`` prepares them."""
    model = AutoModelForCausalLM.from_pretrained(source, experts_implementation="eager")
    if linear:
        linearize_moe(model)
    return model.eval()


def observe(source: Path, dataset: Any = None, attribution: dict[str, Any] | None = None, **run: Any):
    """Scores of a real ``oneshot`` that only observes."""
    modifier = AttributionModifier(**{"channel_metric": "activation"} | (attribution or {}))
    dataset = token_batches(samples=6, length=20) if dataset is None else dataset
    oneshot(model=str(source), dataset=dataset, recipe=[modifier], **{"shuffle_calibration_samples": False} | run)
    return modifier.measured


def padded_with_prompts(labelled: bool) -> Dataset:
    """Samples with padding on the right; where asked, with labels that mask the first tokens of each."""
    dataset = token_batches(samples=4, length=20, padded=True)
    if not labelled:
        return dataset
    labels = []
    for number, sample in enumerate(dataset):
        pairs = zip(sample["input_ids"], sample["attention_mask"], strict=True)
        labels.append([token if mask and place > number else -100 for place, (token, mask) in enumerate(pairs)])
    return dataset.add_column("labels", labels)


def rows(dataset: Dataset) -> list[dict[str, Tensor]]:
    """The samples of a data set as batches of one."""
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
    """Sums of one batch over its real tokens, token by token: squares of channels and inputs, tokens, gates, and both
    attributions.

    The second order is an ablation: the block runs again with the weights of one expert's ``down`` set to zero.
    """
    captured: list[dict[str, Tensor]] = [{} for _ in range(LAYERS)]
    handles = []
    for layer, decoder in enumerate(model.model.layers):
        seen = captured[layer]

        def on_block(_m, args, output, seen=seen):
            seen["block_input"] = args[0]
            seen["y"] = (output[0] if isinstance(output, tuple) else output).reshape(-1, HIDDEN)

        def on_experts(_m, args, seen=seen):
            seen["x"], seen["ids"], seen["gates"] = args[0].reshape(-1, HIDDEN), args[1], args[2].double()

        handles += [
            decoder.mlp.register_forward_hook(on_block),
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
    for layer, seen in enumerate(captured):
        block = model.model.layers[layer].mlp
        for token, counts in enumerate(real):
            if not counts:
                continue
            x_H, y_H = seen["x"][token], seen["y"][token]
            for slot in range(TOP_K):
                expert, gate = int(seen["ids"][token, slot]), seen["gates"][token, slot]
                gate_up = block.experts.gate_up_proj[expert] @ x_H
                activation_I = silu(gate_up[:CHANNELS]) * gate_up[CHANNELS:]
                z_H = block.experts.down_proj[expert] @ activation_I
                sums["squares_LEI"][layer, expert] += activation_I**2
                sums["inputs_LEH"][layer, expert] += x_H**2
                sums["first_order_LE"][layer, expert] += gate * (z_H @ y_H) / (y_H @ y_H)
                sums["tokens_LE"][layer, expert] += 1
                sums["routing_weight_sum_LE"][layer, expert] += gate
        for expert in range(EXPERTS):
            whole = block.experts.down_proj[expert].clone()
            block.experts.down_proj[expert] = 0
            ablated = block(seen["block_input"])
            ablated = (ablated[0] if isinstance(ablated, tuple) else ablated).reshape(-1, HIDDEN)
            block.experts.down_proj[expert] = whole
            loss = (ablated - seen["y"]).square().sum(-1) / seen["y"].square().sum(-1)
            sums["second_order_LE"][layer, expert] = loss[torch.tensor(real)].sum()
    return sums


def channel_scores(model: PreTrainedModel, metric: str, sums: dict[str, Tensor]) -> Tensor:
    """Channel scores ``[L, E, I]`` of a metric, from the sums of all batches, one channel at a time."""
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
    """Every field equal, counts exactly."""
    for name in FIELDS:
        torch.testing.assert_close(getattr(scores, name), reference[name], rtol=1e-5, atol=1e-12, msg=name)
    assert torch.equal(scores.tokens_LE, reference["tokens_LE"])
