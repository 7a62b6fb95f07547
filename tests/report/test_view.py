from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.report.view import PlanView, channel_groups

I = 6  # noqa: E741 - the axis letter of expert channels


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[list[list[int]]], list[list[int]]]:
    """Random widths, and integer scores, whose sums are exact."""
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    channels = st.one_of(st.just([0] * I), st.lists(st.integers(0, 9), min_size=I, max_size=I))
    scores = st.lists(st.lists(channels, min_size=experts, max_size=experts), min_size=layers, max_size=layers)
    widths = st.lists(
        st.lists(st.integers(0, I), min_size=experts, max_size=experts), min_size=layers, max_size=layers
    )
    return draw(scores), draw(widths)


def view_of(scores: list | None, widths: list[list[int]]) -> PlanView:
    names = [f"layer {layer}" for layer in range(len(widths))]
    channels_LEI = None if scores is None else torch.tensor(scores, dtype=torch.float64)
    return PlanView(names, I, torch.tensor(widths), channels_LEI)


def kept_and_total(channels: list[int], width: int) -> tuple[int, int]:
    return sum(sorted(channels, reverse=True)[:width]), sum(channels)


def share(kept: int, total: int, keep_ratio: Fraction) -> float:
    return float(Fraction(kept, total) if total else keep_ratio)


@given(plans())
def test_coverage_is_the_share_of_the_score_in_the_best_channels(plan) -> None:
    scores, widths = plan
    view = view_of(scores, widths)
    assert view.coverage_LE is not None
    assert view.coverage_L is not None
    pairs = [
        [kept_and_total(*pair) for pair in zip(layer, row, strict=True)]
        for layer, row in zip(scores, widths, strict=True)
    ]
    for layer, row in enumerate(pairs):
        expected = [share(*pair, Fraction(width, I)) for pair, width in zip(row, widths[layer], strict=True)]
        assert view.coverage_LE[layer].tolist() == pytest.approx(expected, abs=1e-15)
        kept, total = map(sum, zip(*row, strict=True))
        ratio = Fraction(sum(widths[layer]), I * len(row))
        assert float(view.coverage_L[layer]) == pytest.approx(share(kept, total, ratio), abs=1e-15)
        assert float(view.keep_ratio_L[layer]) == float(ratio)
    kept, total = (sum(pair[which] for row in pairs for pair in row) for which in (0, 1))
    ratio = Fraction(sum(map(sum, widths)), I * len(widths) * len(widths[0]))
    assert view.coverage == pytest.approx(share(kept, total, ratio), abs=1e-15)
    assert view.keep_ratio == float(ratio)
    assert view.coverage_LE.dtype == view.coverage_L.dtype == view.keep_ratio_LE.dtype == torch.float64


@given(plans())
def test_best_channels_cover_at_least_their_share(plan) -> None:
    view = view_of(*plan)
    assert view.coverage_LE is not None
    assert bool((view.coverage_LE >= view.keep_ratio_LE - 1e-15).all())
    assert bool((view.coverage_LE[view.keep_ratio_LE == 1] == 1).all())
    assert bool((view.coverage_LE[view.removed_LE] == 0).all())


@settings(max_examples=30)
@given(plans(), st.integers(1, I))
def test_shares_of_groups_of_channels_sum_to_one(plan, most: int) -> None:
    view = view_of(*plan)
    ends = channel_groups(I, most)
    shares_LEG = view.score_shares(ends)
    assert shares_LEG is not None
    assert view.channels_LEI is not None
    has_score_LE = view.channels_LEI.sum(-1) > 0
    torch.testing.assert_close(shares_LEG.sum(-1), has_score_LE.double())
    # the coverage of a width at the end of a group is the sum of the groups up to it
    for group, end in enumerate(ends):
        coverage_LE = view_of(plan[0], torch.full_like(view.widths_LE, end).tolist()).coverage_LE
        assert coverage_LE is not None
        torch.testing.assert_close(shares_LEG[..., : group + 1].sum(-1)[has_score_LE], coverage_LE[has_score_LE])


@given(st.integers(1, 2000), st.integers(1, 40))
def test_groups_of_channels_have_equal_sizes(channels: int, most: int) -> None:
    ends = channel_groups(channels, most)
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    assert len(ends) == min(most, channels)
    assert sum(sizes) == channels
    assert max(sizes) - min(sizes) <= 1


def test_most_unequal_layer_has_the_widest_spread() -> None:
    assert view_of(None, [[3, 3], [2, 4], [1, 5], [5, 1]]).most_unequal_layer == 2
    assert view_of(None, [[3, 3], [4, 4]]).most_unequal_layer == 0


def test_without_scores_there_is_no_coverage() -> None:
    view = view_of(None, [[3, 0]])
    assert (view.coverage_LE, view.coverage_L, view.coverage, view.score_shares([I])) == (None, None, None, None)
    assert view.removed_LE.tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("channels_LEI", -1.0, "channel scores must not be negative, but layer 0 expert 1"),
        ("channels_LEI", torch.nan, "channel scores must be finite, but layer 0 expert 1"),
        ("expert_prior_LE", torch.inf, "expert importances must be finite, but layer 0 expert 1"),
        ("layer_loss_L", torch.nan, "layer losses must be finite, but layer 1"),
        ("layer_prior_L", torch.nan, "layer importances must be finite, but layer 1"),
    ],
)
def test_values_that_cannot_be_drawn_are_errors(make_view, field: str, value: float, message: str) -> None:
    damaged = getattr(make_view(), field).clone()
    damaged[1 if damaged.ndim == 1 else (0, 1)] = value
    with pytest.raises(CoverageError, match=message):
        make_view(**{field: damaged})


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (["model.layers.1.mlp", "model.layers.3.mlp"], ["1", "3"]),
        (["language_model.layers.11.mlp.experts"], ["11"]),
        (["encoder.layers.1.mlp", "decoder.layers.1.mlp"], ["0", "1"]),
        (["experts", "model.layers.3.mlp"], ["0", "1"]),
    ],
)
def test_labels_of_layers_are_their_numbers_in_the_model(names: list[str], labels: list[str]) -> None:
    assert PlanView(names, I, torch.ones(len(names), 2, dtype=torch.int64)).layer_labels == labels
