"""Sums and scores of ``obs`` in ``oneshot`` runs and on two ranks, compared with autograd and loops over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist

from moe_coverage_plugin.calibration.gathering import gather_scores
from moe_coverage_plugin.calibration.gradients import GradientObserver
from moe_coverage_plugin.calibration.observation import observe_batches
from moe_coverage_plugin.calibration.observer import LayerObserver
from moe_coverage_plugin.core.obs import obs_scores
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
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
from tests.tiny import add_tokenizer, token_batches

RANKS = 2
SUMS = ("gram_EII", "curvature_EII", "tokens_E")


def reference(model: Any, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The sums of all layers, with one outer product for each real token and each of its experts."""
    layers = find_moe_layers(model)
    shape = (LAYERS, EXPERTS, CHANNELS, CHANNELS)
    sums = {name: torch.zeros(shape[: len(name.rpartition("_")[2]) + 1], dtype=torch.float64) for name in SUMS}
    for batch in batches:
        seen: list[tuple[int, int, Tensor, Tensor, Tensor, Tensor]] = []
        for index, layer in enumerate(layers):
            layer.experts.forward = looped(layer, index, seen)
        model.requires_grad_(True).zero_grad()
        masked_loss(model, batch).backward()
        real_T = batch["attention_mask"].flatten().bool()
        for index, expert, token_M, routing_weight_M, a_MI, added_NI in seen:
            for row, token in enumerate(token_M.tolist()):
                if real_T[token]:
                    weighted_I = routing_weight_M[row] * a_MI[row]
                    sums["gram_EII"][index, expert] += torch.outer(weighted_I, weighted_I)
                    sums["curvature_EII"][index, expert] += torch.outer(added_NI.grad[row], added_NI.grad[row])
                    sums["tokens_E"][index, expert] += 1
    return sums


def looped(layer: Any, index: int, seen: list) -> Any:
    """Forward function that computes one expert at a time and adds zeros to activations, to get their gradients."""

    def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert, mlp in enumerate(layer.mlps):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            routing_weight_M = weights[token, slot]
            a = layer.experts._apply_gate(torch.cat([mlp.gate_proj(hidden[token]), mlp.up_proj(hidden[token])], -1))
            added = torch.zeros_like(a, requires_grad=True)
            seen.append((index, expert, token, routing_weight_M.detach(), a.detach(), added))
            out = out.index_add(0, token, (mlp.down_proj(a + added) * routing_weight_M[:, None]).to(out.dtype))
        return out

    return forward


def scores_from(sums: dict[str, Tensor]) -> Tensor:
    """Scores ``[L, E, I]`` from the sums; those of experts without tokens are zero."""
    mean = sums["gram_EII"] / sums["tokens_E"].clamp(min=1)[..., None, None]
    return torch.stack([obs_scores(*layer) for layer in zip(mean, sums["curvature_EII"], strict=True)])


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
    expected = reference(open_stock(family, linear=True), batches)
    _, gradients = observed(open_stock(family, linear=True), batches)
    for name in SUMS:
        found = torch.stack([gradient.sums[name] for gradient in gradients])
        torch.testing.assert_close(found, expected[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("all_experts", [True, False])
def test_scores_of_a_run_equal_those_of_autograd(family, all_experts: bool):
    dataset = padded_with_prompts(labelled=True)
    expected_LEI = scores_from(reference(open_stock(family, linear=True), batches_of(dataset, 1)))
    run = {"batch_size": 4, "moe_calibrate_all_experts": all_experts}
    scores = observe(family, dataset, {"channel_metric": "obs"}, **run)
    assert scores.channel_metric == "obs"
    assert scores.channels_LEI.dtype == torch.float64
    torch.testing.assert_close(scores.channels_LEI, expected_LEI, rtol=1e-7, atol=1e-20)
    fisher = observe(family, dataset, {"channel_metric": "fisher"}, **run)
    for name in ("nll_signed_LE", "nll_absolute_LE", "nll_squared_LE", "first_order_LE", "tokens_LE"):
        assert torch.equal(getattr(scores, name), getattr(fisher, name))


def test_batches_without_a_target_add_nothing(family):
    batches = batches_of(padded_with_prompts(labelled=True), 1)
    masked = batches[0] | {"labels": torch.full_like(batches[0]["labels"], -100)}
    _, with_masked = observed(open_stock(family, linear=True), [masked, *batches[1:]])
    _, without = observed(open_stock(family, linear=True), batches[1:])
    for found, expected in zip(with_masked, without, strict=True):
        assert all(torch.equal(found.sums[name], expected.sums[name]) for name in SUMS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_at_least_float32_and_on_the_cpu(tmp_path: Path, dtype: torch.dtype):
    model = open_stock(save_float64(tmp_path / "model", "qwen3_moe"), linear=True).to(dtype)
    _, gradients = observed(model, batches_of(token_batches(samples=1, length=20), 1))
    for name in ("gram_EII", "curvature_EII"):
        assert gradients[0].sums[name].dtype == torch.promote_types(dtype, torch.float32)
        assert gradients[0].sums[name].device == torch.device("cpu")
        assert bool(gradients[0].sums[name].any())


# --- ranks


def data_of(case: str) -> list[dict[str, Tensor]]:
    """Batches to split over ranks; in case ``masked``, those of the second rank have no targets."""
    batches = batches_of(padded_with_prompts(labelled=True), 1)
    if case == "masked":
        for batch in batches[1::RANKS]:
            batch["labels"] = torch.full_like(batch["labels"], -100)
    return batches


def measure(source: Path, batches: list[dict[str, Tensor]]) -> Tensor:
    return gather_scores(*observed(open_stock(source, linear=True), batches), layer_loss_L=None).channels_LEI


def rank_of_two(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS)
    for case in ("labelled", "masked"):
        torch.save(measure(directory / "model", data_of(case)[rank::RANKS]), directory / f"{case}.{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_compute_the_scores_of_one(tmp_path: Path):
    source = save_float64(tmp_path / "model", "qwen3_moe")
    # ranks are forked from a process that has imported the toolkit, so that it is imported only once
    multiprocessing.set_forkserver_preload(["moe_coverage_plugin.calibration.distributed"])
    multiprocessing.start_processes(rank_of_two, args=(tmp_path,), nprocs=RANKS, start_method="forkserver")
    for case in ("labelled", "masked"):
        one_rank = measure(source, data_of(case))
        first, second = (torch.load(tmp_path / f"{case}.{rank}") for rank in range(RANKS))
        assert torch.equal(first, second)
        torch.testing.assert_close(first, one_rank, rtol=1e-7, atol=1e-20)
        assert torch.equal(first.argsort(dim=-1), one_rank.argsort(dim=-1))
