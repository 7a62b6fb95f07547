import pytest
import torch

from moe_coverage_plugin.report.verdict import verdict
from moe_coverage_plugin.report.view import PlanView

I = 100  # noqa: E741 - the axis letter of expert channels


def view_of(widths: list[list[int]], tokens: list[list[int]] | None = None, scored: bool = True) -> PlanView:
    """A plan whose channels all have the same score, so that coverage is the keep ratio."""
    names = [f"model.layers.{layer + 1}.mlp" for layer in range(len(widths))]
    widths_LE = torch.tensor(widths)
    channels_LEI = torch.ones(*widths_LE.shape, I) if scored else None
    return PlanView(names, I, widths_LE, channels_LEI, tokens_LE=None if tokens is None else torch.tensor(tokens))


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_a_plan_without_findings() -> None:
    result = verdict(view_of([[96, 97], [91, 91], [97, 97]], tokens=[[32, 900]] * 3))
    assert plain(result.summary) == (
        "5.2 % of the expert channels are removed; the channels that remain keep 94.8 % of the measured importance. "
        "The lowest layer, 2, keeps 91.0 %; no layer stands out."
    )
    assert result.warnings == []
    assert result.low_layers == []


def test_layers_that_stand_out_are_named_with_the_lowest_first() -> None:
    result = verdict(view_of([[84, 84], [96, 96], [95, 95], [60, 60], [95, 95]]))
    assert "lowest layer" not in result.summary
    assert [plain(warning) for warning in result.warnings] == [
        "Layers 4 (60.0 %) and 1 (84.0 %) stand out. They keep much less importance than the median layer, which "
        "keeps 95.0 %."
    ]
    assert result.low_layers == [0, 3]


@pytest.mark.parametrize(("lowest", "stands_out"), [(86, False), (85, False), (84, True)])
def test_a_layer_stands_out_ten_points_below_the_median(lowest: int, stands_out: bool) -> None:
    assert verdict(view_of([[95], [lowest], [95]])).low_layers == ([1] if stands_out else [])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([[32, 32], [32, 32]], None),
        ([[32, 31], [32, 32]], "1 expert saw fewer than 32 calibration tokens: expert 1 of layer 1. "),
        (
            [[0, 31], [32, 32]],
            "2 experts saw fewer than 32 calibration tokens, 1 of them none: expert 0 of layer 1 and",
        ),
        ([[32, 32], [0, 32]], "1 expert saw no calibration token: expert 0 of layer 2. "),
    ],
)
def test_experts_with_too_few_tokens_are_named(tokens: list[list[int]], expected: str | None) -> None:
    warnings = verdict(view_of([[50, 50], [50, 50]], tokens)).warnings
    assert len(warnings) == (expected is not None)
    assert expected is None or warnings[0].startswith(expected)


def test_long_lists_are_shortened() -> None:
    (warning,) = verdict(view_of([[50] * 9], tokens=[[0] * 9])).warnings
    assert (
        ": expert 0 of layer 1, expert 1 of layer 1, expert 2 of layer 1, expert 3 of layer 1 and 5 more." in warning
    )


def test_removed_experts_are_counted() -> None:
    assert verdict(view_of([[50, 0], [50, 50]])).summary.endswith(" 1 of 4 experts is removed entirely.")
    assert verdict(view_of([[50, 0], [0, 50]])).summary.endswith(" 2 of 4 experts are removed entirely.")


def test_no_importance_is_shown_without_scores() -> None:
    result = verdict(view_of([[50, 40], [10, 20]], scored=False))
    assert plain(result.summary) == (
        "70.0 % of the expert channels are removed. There are no channel scores, so how much importance remains is "
        "not known."
    )
    assert result.low_layers == []


def test_an_unpruned_model() -> None:
    assert verdict(view_of([[100, 100]] * 2)).summary == "No expert channel is removed."
