"""Statistics of ``oneshot`` runs, compared with loops over the tokens of a plain forward pass."""

from __future__ import annotations

import pytest
import torch

from moe_coverage_plugin import CoverageError
from tests.calibration.brute_force import (
    CHANNELS,
    EXPERTS,
    LAYERS,
    assert_scores,
    channel_scores,
    observe,
    open_stock,
    rows,
    save_float64,
    statistics,
)
from tests.tiny import save_model, token_batches

FAMILIES = ("qwen3_moe", "qwen2_moe")
RUNS = (
    {"moe_calibrate_all_experts": True, "batch_size": 1},
    {"moe_calibrate_all_experts": True, "batch_size": 3},
    {"moe_calibrate_all_experts": False, "batch_size": 1},
    {"moe_calibrate_all_experts": False, "batch_size": 3, "pipeline": "basic"},
    {"moe_calibrate_all_experts": True, "batch_size": 3, "pipeline": "basic"},
    {"moe_calibrate_all_experts": False, "batch_size": 3, "pipeline": "sequential"},
)
DATA = {"samples": 6, "length": 20}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A model and its expected statistics; Qwen2-MoE has a shared expert, whose output is part of ``y``."""
    source = save_float64(tmp_path_factory.mktemp("source"), request.param)
    model = open_stock(source)
    parts = [statistics(model, batch) for batch in rows(token_batches(**DATA))]
    sums = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
    return source, model, parts, sums


@pytest.mark.parametrize("run", RUNS, ids=lambda run: "-".join(map(str, run.values())))
def test_statistics_equal_a_loop_over_tokens(family, run):
    """Case 18: routing weights are applied after the expert, as these families do, and only for routed tokens.

    Case 19: the statistics do not depend on whether the toolkit passes every token through every expert.
    """
    source, model, _, sums = family
    scores = observe(source, token_batches(**DATA), **run)
    assert scores.channels_LEI.shape == (LAYERS, EXPERTS, CHANNELS)
    assert_scores(scores, sums | {"channels_LEI": channel_scores(model, "activation", sums)})


@pytest.mark.parametrize("metric", ["weight", "weight_activation"])
def test_channel_metrics(family, metric):
    source, model, _, sums = family
    scores = observe(source, token_batches(**DATA), {"channel_metric": metric})
    reference = channel_scores(model, metric, sums)
    torch.testing.assert_close(scores.channels_LEI, reference, rtol=1e-5, atol=0)


def test_moving_average_equals_a_loop_over_batches(family):
    source, _, parts, sums = family
    decay = 0.7
    scores = observe(source, token_batches(**DATA), {"ema": decay}, batch_size=1)
    for name, found in (("second_order_LE", scores.second_order_LE), ("squares_LEI", scores.channels_LEI.square())):
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                average = None
                for part in parts:
                    # batches without tokens of an expert do not change its average
                    if part["tokens_LE"][layer, expert] == 0:
                        continue
                    batch = part[name][layer, expert]
                    average = batch if average is None else decay * average + (1 - decay) * batch
                average = torch.zeros_like(found[layer, expert]) if average is None else average
                torch.testing.assert_close(found[layer, expert], average, rtol=1e-5, atol=0)
    assert torch.equal(scores.tokens_LE, sums["tokens_LE"])
    torch.testing.assert_close(scores.routing_weight_sum_LE, sums["routing_weight_sum_LE"], rtol=1e-6, atol=0)


def test_experts_without_tokens_have_zero_scores_and_are_reported(family):
    source = family[0]
    scores = observe(source, token_batches(samples=1, length=2))
    unreached_LE = scores.tokens_LE == 0
    assert (unreached_LE.sum(-1) >= EXPERTS - 4).all(), "two tokens reach at most four experts"
    assert scores.unreached == {
        name: [expert for expert in range(EXPERTS) if unreached_LE[layer, expert]]
        for layer, name in enumerate(scores.names)
    }
    for values in (scores.channels_LEI, scores.first_order_LE, scores.second_order_LE, scores.routing_weight_sum_LE):
        assert torch.isfinite(values).all()
        assert (values[unreached_LE] == 0).all()


@pytest.fixture
def unchecked_weights(monkeypatch):
    """Activations overflow also where weights are finite; here weights stand for that, which are checked before."""
    monkeypatch.setattr("moe_coverage_plugin.modifiers.attribution.check_finite", lambda _model: None)


@pytest.mark.usefixtures("unchecked_weights")
@pytest.mark.parametrize("layer_noise", [None, 1.0])
@pytest.mark.parametrize(("value", "all_experts"), [(float("nan"), True), (float("inf"), False)])
def test_nan_activations_are_an_error_that_names_layer_and_expert(tmp_path, layer_noise, all_experts, value):
    source = save_model(tmp_path, num_hidden_layers=2, moe_intermediate_size=CHANNELS)
    model = open_stock(source)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[3, 0, 0] = value
    model.save_pretrained(source)
    with pytest.raises(CoverageError, match=r"^model\.layers\.1\.mlp\.experts expert 3 has NaN or infinite"):
        observe(source, attribution={"layer_noise": layer_noise}, moe_calibrate_all_experts=all_experts)


@pytest.mark.usefixtures("unchecked_weights")
def test_an_unpruned_model_with_nan_loss_is_an_error(tmp_path):
    source = save_model(tmp_path, num_hidden_layers=2, moe_intermediate_size=CHANNELS)
    model = open_stock(source)
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    model.save_pretrained(source)
    with pytest.raises(CoverageError, match="loss on the calibration set is nan"):
        observe(source, attribution={"layer_noise": 1.0})


def test_reference_values_are_not_trivial(family):
    sums = family[3]
    assert (sums["tokens_LE"].sum(-1) == 6 * 20 * 2).all()
    assert len(sums["second_order_LE"].unique()) == LAYERS * EXPERTS
