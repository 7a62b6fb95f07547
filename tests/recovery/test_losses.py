"""Losses and gradients, compared with autograd and transformers."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import remove_expert
from moe_coverage_plugin.recovery import RecoveryOptions
from moe_coverage_plugin.recovery.losses import LoadBalance, batch_loss
from tests.checkpoint.runs import linear_model, prompt


def values(seed: int) -> torch.Tensor:
    return torch.randn(2, 7, 11, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


@pytest.mark.parametrize(("distill", "temperature"), [(1.0, 1.0), (0.3, 2.0), (None, 1.0)])
def test_gradient_equals_autograd(distill, temperature):
    student, ids_BS = values(0).requires_grad_(), torch.arange(14).reshape(2, 7) % 11
    teacher = None if distill is None else values(1)
    options = RecoveryOptions(distill=distill or 1.0, temperature=temperature)
    found = batch_loss(student, ids_BS, teacher, options, 0.25)
    nll = cross_entropy(student[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten(), reduction="sum")
    loss = nll
    if teacher is not None:
        first, second = (torch.log_softmax(each[:, :-1] / temperature, -1) for each in (student, teacher))
        divergence = temperature**2 * kl_div(first, second, reduction="sum", log_target=True)
        torch.testing.assert_close(found.divergence.float(), divergence.detach())
        loss = (1 - distill) * nll + distill * divergence
    (0.25 * loss).backward()
    torch.testing.assert_close(found.nll.float(), nll.detach())
    assert student.grad is not None
    torch.testing.assert_close(found.gradient_BSV, student.grad, rtol=1e-5, atol=1e-6)


def test_balance_loss_equals_that_of_transformers():
    """The model has one layer, because transformers averages over the tokens of all layers."""
    model = linear_model("qwen3_moe", num_hidden_layers=1)
    balance = LoadBalance(find_moe_layers(model))
    with balance.observed():
        found = model(input_ids=prompt(), output_router_logits=True)
    expected = load_balancing_loss_func(found.router_logits, 8, 2)
    torch.testing.assert_close(balance.loss(), expected)


def test_balance_loss_is_over_kept_experts():
    model = linear_model("qwen3_moe", num_hidden_layers=1)
    (layer,) = find_moe_layers(model)
    remove_expert(layer, 2)
    remove_expert(layer, 5)
    mask_router(layer)
    balance = LoadBalance([layer])
    with balance.observed():
        router_logits = model(input_ids=prompt(), output_router_logits=True).router_logits[0]
    kept = [0, 1, 3, 4, 6, 7]
    expected = load_balancing_loss_func((router_logits[:, kept],), len(kept), 2)
    torch.testing.assert_close(balance.loss(), expected)
    with torch.no_grad(), balance.observed():
        balance.clear()
        model(input_ids=prompt())
    assert not balance._terms, "evaluation must not record terms"
