"""Scores of the gradient pass in ``oneshot`` runs, compared with autograd.

The reference multiplies each value of each expert by a factor of 1. The derivative of the loss by this factor is the
product of the value and its gradient, so the reference needs no activations and no gradients of them.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.calibration import next_token, observation
from moe_coverage_plugin.calibration.gradients import GradientObserver
from moe_coverage_plugin.calibration.next_token import drawn_tokens
from moe_coverage_plugin.calibration.observation import observe_batches
from moe_coverage_plugin.calibration.observer import LayerObserver
from moe_coverage_plugin.core.scores import TOKEN_FLOOR, AttributionScores
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers, projections
from tests.calibration.brute_force import (
    CHANNELS,
    EXPERTS,
    LAYERS,
    batches_of,
    masked_loss,
    observe,
    open_stock,
    padded_with_prompts,
    save_float64,
)
from tests.tiny import VOCAB, add_tokenizer, token_batches

pytestmark = pytest.mark.slow

METRICS = ("fisher", "activation_gradient", "gradient", "snip")


class Factors:
    """Factors of 1 and summands of 0 for every value of a batch.

    The gradient of a factor is the product of the value and its gradient; that of a summand is the value's gradient.
    """

    def __init__(self) -> None:
        self.products: dict[tuple[int, int, str], Tensor] = {}
        self.plain: dict[tuple[int, int, str], Tensor] = {}

    def __call__(self, layer: int, expert: int, name: str, value: Tensor) -> Tensor:
        key = (layer, expert, name)
        self.products[key] = torch.ones_like(value, requires_grad=True)
        self.plain[key] = torch.zeros_like(value, requires_grad=True)
        return value * self.products[key] + self.plain[key]


def reference(model: Any, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Channel scores of every metric and the three importances by autograd through the entire model."""
    layers = find_moe_layers(model)
    totals: dict[str, Tensor] = defaultdict(lambda: torch.zeros(LAYERS, EXPERTS, CHANNELS, dtype=torch.float64))
    squares: dict[str, Tensor] = defaultdict(lambda: torch.zeros(LAYERS, EXPERTS, CHANNELS, dtype=torch.float64))
    nll = torch.zeros(3, LAYERS, EXPERTS, dtype=torch.float64)
    for batch in batches:
        factors = Factors()
        for index, layer in enumerate(layers):
            layer.experts.forward = looped(layer, index, factors)
        model.requires_grad_(True).zero_grad()
        masked_loss(model, batch).backward()
        for index, layer in enumerate(layers):
            for expert, mlp in enumerate(layer.mlps):
                value = {name: factors.products[index, expert, name].grad for name in ("gate", "up", "a", "z")}
                plain = {name: factors.plain[index, expert, name].grad for name in ("gate", "up", "a")}
                totals["fisher"][index, expert] += value["a"].square().sum(0)
                totals["fourth"][index, expert] += value["a"].pow(4).sum(0)
                totals["activation_gradient"][index, expert] += sum(value[k].abs().sum(0) for k in plain) / 3
                for name in plain:
                    squares[name][index, expert] += plain[name].square().sum(0)
                for name, linear in projections(mlp).items():
                    sensitivity = (linear.weight * linear.weight.grad).abs()
                    totals["snip"][index, expert] += sensitivity.sum(0 if name == "down_proj" else 1).detach() / 3
                u_T = value["z"].sum(-1)
                nll[:, index, expert] += torch.stack([-u_T.sum(), u_T.abs().sum(), u_T.square().sum()])
    totals["gradient"] = sum(each.sqrt() for each in squares.values()) / 3
    return dict(totals) | dict(zip(("nll_signed", "nll_absolute", "nll_squared"), nll, strict=True))


def looped(layer: Any, index: int, factors: Factors) -> Any:
    """Forward function of a layer's experts that computes one expert at a time."""

    def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert, mlp in enumerate(layer.mlps):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate = factors(index, expert, "gate", mlp.gate_proj(hidden[token]))
            up = factors(index, expert, "up", mlp.up_proj(hidden[token]))
            a = factors(index, expert, "a", layer.experts._apply_gate(torch.cat([gate, up], -1)))
            z = factors(index, expert, "z", mlp.down_proj(a))
            out = out.index_add(0, token, (z * weights[token, slot, None]).to(out.dtype))
        return out

    return forward


def assert_equal(scores: AttributionScores, expected: dict[str, Tensor], metric: str) -> None:
    torch.testing.assert_close(scores.channels_LEI, expected[metric], rtol=1e-5, atol=1e-12)
    for name in ("nll_signed", "nll_absolute", "nll_squared"):
        torch.testing.assert_close(getattr(scores, f"{name}_LE"), expected[name], rtol=1e-5, atol=1e-10)
    if metric == "fisher":
        tokens_LEI = torch.where(expected["fourth"] > 0, expected["fisher"].square() / expected["fourth"], 0.0)
        torch.testing.assert_close(scores.effective_tokens_LE, tokens_LEI.median(-1).values, rtol=1e-5, atol=1e-10)
        assert scores.few_tokens_LE is not None
        assert torch.equal(scores.few_tokens_LE, (tokens_LEI < TOKEN_FLOOR).sum(-1))
    else:
        assert scores.few_tokens_LE is scores.effective_tokens_LE is None


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe", "gpt_oss"])
def family(request, tmp_path_factory):
    """Models with plain experts, with a shared expert, and with biases and another activation function."""
    width = {"intermediate_size": CHANNELS, "num_local_experts": EXPERTS} if request.param == "gpt_oss" else {}
    return add_tokenizer(save_float64(tmp_path_factory.mktemp("source"), request.param, **width))


@pytest.mark.parametrize("metric", METRICS)
def test_scores_equal_autograd(family, metric: str):
    dataset = padded_with_prompts(labelled=True)
    expected = reference(open_stock(family, linear=True), batches_of(dataset, 2))
    assert_equal(observe(family, dataset, {"channel_metric": metric}, batch_size=2), expected, metric)


@pytest.mark.parametrize(("batch_size", "all_experts"), [(1, True), (4, False)])
def test_batches_and_all_experts_mode_do_not_matter(family, batch_size: int, all_experts: bool):
    dataset = padded_with_prompts(labelled=False)
    expected = reference(open_stock(family, linear=True), batches_of(dataset, 1))
    run = {"batch_size": batch_size, "moe_calibrate_all_experts": all_experts}
    assert_equal(observe(family, dataset, {"channel_metric": "fisher"}, **run), expected, "fisher")


@pytest.mark.parametrize("importance", ["nll_signed", "nll_absolute", "nll_squared"])
def test_importance_from_gradients_with_scores_in_closed_form(family, importance: str):
    dataset = padded_with_prompts(labelled=False)
    plain = observe(family, dataset)
    both = observe(family, dataset, {"expert_importance": importance})
    expected = reference(open_stock(family, linear=True), batches_of(dataset, 1))
    assert_equal(both, expected | {"activation": plain.channels_LEI}, "activation")
    for name in ("first_order_LE", "second_order_LE", "tokens_LE", "routing_weight_sum_LE"):
        torch.testing.assert_close(getattr(both, name), getattr(plain, name), rtol=1e-9, atol=1e-12)


def test_signed_importance_is_the_slope_of_the_loss(tmp_path):
    """If an expert's output is multiplied by ``1 - eps``, the loss rises by ``eps`` times its signed importance."""
    source = save_float64(tmp_path / "model", "qwen3_moe")
    dataset = token_batches(samples=2, length=20)
    scores = observe(source, dataset, {"expert_importance": "nll_signed"})
    model, batch, step = open_stock(source, linear=True), batches_of(dataset, 2)[0], 1e-2

    @torch.no_grad()
    def loss(layer: int, expert: int, factor: float) -> Tensor:
        weight = find_moe_layers(model)[layer].mlps[expert].down_proj.weight
        original = weight.clone()
        weight.mul_(factor)
        found = masked_loss(model, batch)
        weight.copy_(original)
        return found

    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            slope = (loss(layer, expert, 1 - step) - loss(layer, expert, 1 + step)) / (2 * step)
            torch.testing.assert_close(scores.nll_signed_LE[layer, expert], slope, rtol=1e-2, atol=1e-3)


def test_batches_without_a_target_add_nothing_and_are_counted(family, log):
    dataset = padded_with_prompts(labelled=True)
    masked = dataset.map(lambda _row, number: {"labels": [-100] * 20} if number == 0 else {}, with_indices=True)
    scores = observe(family, masked, {"channel_metric": "fisher"})
    expected = observe(family, dataset.select(range(1, len(dataset))), {"channel_metric": "fisher"})
    torch.testing.assert_close(scores.channels_LEI, expected.channels_LEI, rtol=1e-9, atol=1e-15)
    assert any("1 of 4 batches predict no token" in line for line in log)


def test_the_pass_does_not_change_the_model(family):
    model = open_stock(family, linear=True).train()
    model.lm_head.weight.requires_grad_(False)
    before = {name: (tensor.clone(), tensor.requires_grad) for name, tensor in model.named_parameters()}
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    layers = find_moe_layers(model)
    observe_batches(
        model,
        batches_of(padded_with_prompts(labelled=False), 2),
        [LayerObserver(layer, "fisher", None) for layer in layers],
        [GradientObserver(layer, "fisher") for layer in layers],
    )
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, before[name][0])
        assert tensor.requires_grad == before[name][1]
        assert tensor.grad is None, f"{name} got a gradient"
    assert model.training
    for name, module in model.named_modules():
        assert vars(module).get("forward") == forwards[name]
        assert not module._forward_hooks


def test_gradients_of_attention_are_repeatable(family, monkeypatch: pytest.MonkeyPatch):
    """Each layer's attention is found in each batch. If not, nothing but scores on a GPU would show it."""
    switched: list[bool] = []
    switch = torch.use_deterministic_algorithms

    def record(mode: bool, **options: Any) -> None:
        switched.append(mode)
        switch(mode, **options)

    monkeypatch.setattr(torch, "use_deterministic_algorithms", record)
    # AutoRound switches it on for the process
    before = torch.are_deterministic_algorithms_enabled()
    switch(False)
    try:
        observe(family, token_batches(samples=4, length=20), {"channel_metric": "fisher"}, batch_size=2)
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        switch(before)
    config = open_stock(family).config
    # attention of other implementations consists of products here
    kernels = config.num_hidden_layers if config._attn_implementation == "sdpa" else 0
    assert switched.count(True) == 2 * kernels


def test_layers_without_gradients_are_an_error(family, monkeypatch):
    """Layers that take hidden states by keyword cannot be recomputed; scores of zero must not be returned for them."""
    layer_class = type(open_stock(family, linear=True).model.layers[0])
    call = layer_class.__call__
    monkeypatch.setattr(layer_class, "__call__", lambda self, hidden, **kw: call(self, hidden_states=hidden, **kw))
    with pytest.raises(CoverageError, match="no gradient of the loss reaches"):
        observe(family, padded_with_prompts(labelled=False), {"channel_metric": "fisher"})


def test_loss_gradient_in_chunks_of_positions(monkeypatch):
    monkeypatch.setattr(next_token, "CHUNK_POSITIONS", 3)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 7, VOCAB, dtype=torch.float64, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCAB, (2, 7), generator=generator)
    targets[0, :4] = -100
    found = next_token.loss_gradient(logits, targets)
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    torch.testing.assert_close(found.logits_grad_BSV, logits.grad)
    assert found.tokens == 10


# --- labels drawn from the model


def test_drawn_tokens_have_the_models_frequencies():
    """At positions that count; others stay without a target."""
    logits_V = torch.tensor([1.0, 0.0, -2.0, 3.0])
    targets_BS = torch.zeros(2, 5000).long()
    targets_BS[:, ::2] = -100
    drawn_BS = drawn_tokens(logits_V.expand(2, 5000, 4), targets_BS, torch.Generator().manual_seed(0))
    assert torch.equal(drawn_BS == -100, targets_BS == -100)
    shares_V = torch.bincount(drawn_BS[drawn_BS >= 0], minlength=4) / 5000
    torch.testing.assert_close(shares_V, logits_V.softmax(-1), rtol=0, atol=0.02)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_scores_of_drawn_labels_equal_autograd(family, batch_size: int, monkeypatch: pytest.MonkeyPatch):
    """With the drawn tokens as labels; the same in every run, and not those of the text."""
    dataset = padded_with_prompts(labelled=True)
    drawn: list[Tensor] = []
    draw = observation.drawn_tokens

    def recorded(*args: Any) -> Tensor:
        drawn.append(draw(*args))
        return drawn[-1]

    monkeypatch.setattr(observation, "drawn_tokens", recorded)
    run = {"attribution": {"channel_metric": "fisher", "labels": "model"}, "batch_size": batch_size}
    scores, again = (observe(family, dataset, **run) for _ in range(2))
    batches = batches_of(dataset, batch_size)
    assert len(drawn) == 2 * len(batches)
    assert torch.equal(scores.channels_LEI, again.channels_LEI)
    for batch, next_BS in zip(batches, drawn, strict=False):
        # the label of a position is the token at it, so the next tokens move one place to the right
        batch["labels"] = torch.nn.functional.pad(next_BS[:, :-1], (1, 0), value=-100)
    assert_equal(scores, reference(open_stock(family, linear=True), batches), "fisher")
    text = observe(family, dataset, {"channel_metric": "fisher"}, batch_size=batch_size)
    assert not torch.allclose(text.channels_LEI, scores.channels_LEI, rtol=1e-2)
