"""Sums and scores of ``obs`` in ``oneshot`` runs, compared with autograd and loops over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_coverage_plugin.calibration import interactions
from moe_coverage_plugin.calibration.gradients import GradientObserver
from moe_coverage_plugin.calibration.observation import observe_batches
from moe_coverage_plugin.calibration.observer import LayerObserver
from moe_coverage_plugin.core.obs import obs_scores, pooled_curvature
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.options import ChannelMetric
from tests.calibration.brute_force import (
    CHANNELS,
    EXPERTS,
    HIDDEN,
    batches_of,
    masked_loss,
    observe,
    open_stock,
    padded_with_prompts,
    save_float64,
)
from tests.tiny import add_tokenizer, token_batches

SHAPES = {
    "squares_EI": (EXPERTS, CHANNELS),
    "output_HH": (HIDDEN, HIDDEN),
    "gram_EII": (EXPERTS, CHANNELS, CHANNELS),
    "tokens_E": (EXPERTS,),
}


def reference(model: Any, batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The sums of each layer, with one outer product for each real token and each of its experts."""
    layers = find_moe_layers(model)
    sums_L = [{name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in layers]
    for batch in batches:
        seen: list[tuple[int, int, Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        for index, layer in enumerate(layers):
            layer.experts.forward = looped(layer, index, seen)
        model.requires_grad_(True).zero_grad()
        masked_loss(model, batch).backward()
        real_T = batch["attention_mask"].flatten().bool()
        for index, expert, token_M, routing_weight_M, a_MI, added_MI, added_MH in seen:
            sums = sums_L[index]
            sums["tokens_E"][expert] += real_T[token_M].sum()
            for row, token in enumerate(token_M.tolist()):
                # of a token without activations, no channel can be missed
                if real_T[token] and a_MI[row].any():
                    weighted_I = routing_weight_M[row] * a_MI[row]
                    sums["gram_EII"][expert] += torch.outer(weighted_I, weighted_I)
                    sums["squares_EI"][expert] += added_MI.grad[row].square()
                    sums["output_HH"] += torch.outer(added_MH.grad[row], added_MH.grad[row])
    return sums_L


def looped(layer: Any, index: int, seen: list) -> Any:
    """Forward function that computes one expert at a time, and adds zeros to its values to get their gradients."""

    def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert, mlp in enumerate(layer.mlps):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            routing_weight_M = weights[token, slot]
            a = layer.experts._apply_gate(torch.cat([mlp.gate_proj(hidden[token]), mlp.up_proj(hidden[token])], -1))
            added_a = torch.zeros_like(a, requires_grad=True)
            z = mlp.down_proj(a + added_a)
            added_z = torch.zeros_like(z, requires_grad=True)
            seen.append((index, expert, token, routing_weight_M.detach(), a.detach(), added_a, added_z))
            out = out.index_add(0, token, ((z + added_z) * routing_weight_M[:, None]).to(out.dtype))
        return out

    return forward


def scores_from(model: Any, sums_L: list[dict[str, Tensor]]) -> Tensor:
    """Scores ``[L, E, I]`` from the sums; those of experts without tokens are zero."""
    scores = []
    for layer, sums in zip(find_moe_layers(model), sums_L, strict=True):
        down_EHI = torch.stack([mlp.down_proj.weight for mlp in layer.mlps])
        curvature_EII = pooled_curvature(down_EHI, sums["output_HH"], sums["squares_EI"])
        mean_EII = sums["gram_EII"] / sums["tokens_E"].clamp(min=1)[:, None, None]
        scores.append(obs_scores(mean_EII, curvature_EII))
    return torch.stack(scores)


def observed(model: Any, batches: list[dict[str, Tensor]]) -> tuple[list[LayerObserver], list[GradientObserver]]:
    layers = find_moe_layers(model)
    observers = [LayerObserver(layer, "obs", None) for layer in layers]
    gradients = [GradientObserver(layer, "obs") for layer in layers]
    observe_batches(model, batches, observers, gradients)
    return observers, gradients


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe", "gpt_oss"])
def family(request, tmp_path_factory):
    """Models with plain experts, with a shared expert, and with biases and another activation function."""
    width = {"intermediate_size": CHANNELS, "num_local_experts": EXPERTS} if request.param == "gpt_oss" else {}
    return add_tokenizer(save_float64(tmp_path_factory.mktemp("source"), request.param, **width))


@pytest.mark.parametrize(("size", "labelled"), [(1, False), (2, True)])
def test_sums_equal_autograd(family, size: int, labelled: bool):
    batches = batches_of(padded_with_prompts(labelled), size)
    sums_L = reference(open_stock(family, linear=True), batches)
    _, gradients = observed(open_stock(family, linear=True), batches)
    assert_equal_sums(gradients, sums_L)


def assert_equal_sums(gradients: list[GradientObserver], sums_L: list[dict[str, Tensor]]) -> None:
    for gradient, sums in zip(gradients, sums_L, strict=True):
        assert bool(sums["output_HH"].any())
        assert len(gradient.sums["gradient_UEI"]) == 1
        torch.testing.assert_close(gradient.sums["gradient_UEI"][0], sums["squares_EI"], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(gradient.sums["output_HH"], sums["output_HH"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("all_experts", [True, False])
def test_scores_of_a_run_equal_those_of_autograd(family, all_experts: bool):
    dataset = padded_with_prompts(labelled=True)
    model = open_stock(family, linear=True)
    expected_LEI = scores_from(model, reference(model, batches_of(dataset, 1)))
    run = {"batch_size": 4, "moe_calibrate_all_experts": all_experts}
    scores = observe(family, dataset, {"channel_metric": "obs"}, **run)
    assert scores.channel_metric == "obs"
    assert scores.channels_LEI.dtype == torch.float64
    torch.testing.assert_close(scores.channels_LEI, expected_LEI, rtol=1e-7, atol=1e-20)
    fisher = observe(family, dataset, {"channel_metric": "fisher"}, **run)
    for name in ("nll_signed_LE", "nll_absolute_LE", "nll_squared_LE", "first_order_LE", "tokens_LE"):
        assert torch.equal(getattr(scores, name), getattr(fisher, name))


def test_a_hidden_state_of_zeros_does_not_decide_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It stays zero in a model without biases, and each RMSNorm multiplies its gradients by 1,000."""
    source = save_float64(tmp_path / "model", "qwen3_moe")
    batches = batches_of(token_batches(samples=2, length=20), 1)
    batches[0]["input_ids"][0, 0] = 0

    def opened() -> Any:
        model = open_stock(source, linear=True)
        model.get_input_embeddings().weight.data[0] = 0
        return model

    expected_L = reference(opened(), batches)
    _, gradients = observed(opened(), batches)
    assert_equal_sums(gradients, expected_L)
    monkeypatch.setattr("moe_coverage_plugin.calibration.gradients.active_rows", lambda a_MI: a_MI[:, 0] == a_MI[:, 0])
    _, unfiltered = observed(opened(), batches)
    for gradient, expected in zip(unfiltered, expected_L, strict=True):
        assert gradient.sums["gradient_UEI"].max() > 1e3 * expected["squares_EI"].max()
        assert gradient.sums["output_HH"].trace() > 1e3 * expected["output_HH"].trace()


@pytest.mark.parametrize("metric", ["obs", "fisher", "gradient", "activation_gradient", "snip"])
def test_scores_hardly_depend_on_a_hidden_state_of_zeros(tmp_path: Path, metric: ChannelMetric):
    """Windows with and without it before the same tokens have scores of the same size."""
    source = save_float64(tmp_path / "model", "qwen3_moe")
    model = open_stock(source, linear=True)
    model.get_input_embeddings().weight.data[0] = 0
    rest = batches_of(token_batches(samples=2, length=20), 1)
    behind = [{name: torch.cat([column[:, :1], column], 1) for name, column in batch.items()} for batch in rest]
    for batch in behind:
        batch["input_ids"][:, 0] = 0
    totals = []
    for batches in (rest, behind):
        layers = find_moe_layers(model)
        gradients = [GradientObserver(layer, metric) for layer in layers]
        observe_batches(model, batches, [LayerObserver(layer, metric, None) for layer in layers], gradients)
        totals.append(torch.stack([each.sums["gradient_UEI"].sum() for each in gradients]))
    assert bool((totals[1] < 4 * totals[0]).all())


def test_batches_without_a_target_add_no_gradients(family):
    batches = batches_of(padded_with_prompts(labelled=True), 1)
    masked = batches[0] | {"labels": torch.full_like(batches[0]["labels"], -100)}
    _, with_masked = observed(open_stock(family, linear=True), [masked, *batches[1:]])
    _, without = observed(open_stock(family, linear=True), batches[1:])
    for found, expected in zip(with_masked, without, strict=True):
        assert all(torch.equal(found.sums[name], expected.sums[name]) for name in expected.sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_moments_are_at_least_float32(tmp_path: Path, dtype: torch.dtype):
    model = open_stock(save_float64(tmp_path / "model", "qwen3_moe"), linear=True).to(dtype)
    _, gradients = observed(model, batches_of(token_batches(samples=1, length=20), 1))
    for gradient in gradients:
        assert gradient.sums["output_HH"].dtype == torch.promote_types(dtype, torch.float32)
        assert bool(gradient.sums["output_HH"].any())


def test_other_metrics_keep_no_moments(family):
    layers = find_moe_layers(open_stock(family, linear=True))
    assert "output_HH" in GradientObserver(layers[0], "obs").sums
    assert not any(
        "output_HH" in GradientObserver(layers[0], metric).sums for metric in ("fisher", "gradient", "snip")
    )


@pytest.mark.parametrize(("gib", "expected"), [(0, 64), (8, 130), (16, 196), (64, 196)])
def test_as_many_experts_are_scored_together_as_fit(monkeypatch: pytest.MonkeyPatch, gib: int, expected: int):
    """Half of free GPU memory, or 6.5 GB, takes so many sets of 7 float64 matrices of 768 channels; at least 64."""
    monkeypatch.setattr(interactions, "free_memory", lambda _: gib * 2**30)
    monkeypatch.setattr(interactions, "uniform_shape", lambda _: (512, 768))
    layer: Any = None
    assert interactions._scored_together(layer, torch.device("cuda")) == expected
    assert interactions._scored_together(layer, torch.device("cpu")) == 64
