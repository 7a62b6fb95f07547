"""The rise of the loss when the output of a layer is scaled, compared with a forward pass with a scaling hook."""

from __future__ import annotations

import pytest
import torch

from moe_coverage_plugin.calibration.layer_loss import layer_loss_rise
from moe_coverage_plugin.calibration.next_token import next_token_loss
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from tests.calibration.brute_force import LAYERS, observe, open_stock, rows, save_float64
from tests.tiny import token_batches


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen2_moe"])
def source(request, tmp_path_factory):
    return save_float64(tmp_path_factory.mktemp("source"), request.param)


@torch.no_grad()
def mean_loss(model, samples, scale=1.0, layer=None):
    """Mean next-token loss without padding, computed token by token."""
    handle = None
    if layer is not None:
        handle = model.model.layers[layer].mlp.register_forward_hook(lambda _m, _a, out: out * scale)
    losses = []
    for sample in samples:
        ids, mask = sample["input_ids"][0], sample["attention_mask"][0]
        logits = model(**sample).logits[0].double()
        for position in range(len(ids) - 1):
            if mask[position + 1]:
                losses.append(-logits[position].log_softmax(-1)[ids[position + 1]])
    if handle is not None:
        handle.remove()
    return torch.stack(losses).mean()


def count_hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("noise", [1.0, 0.25])
@pytest.mark.parametrize("padded", [False, True])
def test_rise_equals_that_of_a_scaling_hook(source, noise, padded):
    samples = rows(token_batches(samples=5, length=20, padded=padded))
    stock = open_stock(source)
    base = mean_loss(stock, samples)
    reference = torch.stack([mean_loss(stock, samples, 1 - noise, layer) - base for layer in range(LAYERS)])
    model = open_stock(source, linear=True)
    pairs = [samples[i : i + 2] for i in (0, 2, 4)]
    batches = [{key: torch.cat([sample[key] for sample in pair]) for key in pair[0]} for pair in pairs]
    before, hooks = model(**batches[0]).logits, count_hooks(model)
    rise = layer_loss_rise(model, find_moe_layers(model), batches, noise)
    # cross entropy is computed in float32
    torch.testing.assert_close(rise, reference, rtol=0, atol=2e-6)
    assert rise.abs().min() > 1e-4, "zeros would also pass the comparison"
    assert torch.equal(model(**batches[0]).logits, before)
    assert count_hooks(model) == hooks


def test_oneshot_measures_the_first_batches_only(source):
    data = token_batches(samples=6, length=20)
    found = observe(source, data, {"layer_noise": 1.0, "layer_batches": 2}, batch_size=1).layer_loss_L
    stock = open_stock(source)
    base = mean_loss(stock, rows(data)[:2])
    reference = torch.stack([mean_loss(stock, rows(data)[:2], 0.0, layer) - base for layer in range(LAYERS)])
    torch.testing.assert_close(found, reference, rtol=0, atol=2e-6)


def test_the_model_is_restored_after_an_error(source):
    """Case 31: a failed measurement leaves no weight, hook or setting changed."""
    model = open_stock(source, linear=True)
    batch = rows(token_batches(samples=1, length=20))[0]
    before, hooks, cache = model(**batch).logits, count_hooks(model), model.config.use_cache
    too_long = {"input_ids": batch["input_ids"], "attention_mask": torch.ones(1, 7, dtype=torch.int64)}
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        layer_loss_rise(model, find_moe_layers(model), [batch, too_long], 1.0)
    assert count_hooks(model) == hooks
    assert model.config.use_cache == cache
    assert torch.equal(model(**batch).logits, before)


def test_the_loss_does_not_include_padding(source):
    model = open_stock(source)
    sample = rows(token_batches(samples=2, length=20, padded=True))[1]
    real = int(sample["attention_mask"].sum())
    assert real < 20
    loss, tokens = next_token_loss(model, sample)
    short = {key: value[:, :real] for key, value in sample.items()}
    assert tokens == real - 1
    torch.testing.assert_close(loss, next_token_loss(model, short)[0], rtol=1e-6, atol=0)
