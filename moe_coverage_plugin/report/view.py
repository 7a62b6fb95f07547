"""What the page and the picture of a plan show: widths, the importance they are based on, and what they keep."""

# ruff: noqa: N802 - properties carry axis suffixes
from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from moe_coverage_plugin.core.checks import require_finite, require_non_negative
from moe_coverage_plugin.core.ragged import prefix_scores
from moe_coverage_plugin.report.summary import Summary


@dataclass(frozen=True, eq=False)
class PlanView:
    """Widths of all experts and the measurements they are based on; ``None`` for what was not measured.

    Derived figures are float64 on the CPU. As in :mod:`moe_coverage_plugin.core.coverage`, scores that are all zero
    count as equal scores, so their coverage is the keep ratio.

    Attributes:
        names: module path of each MoE layer, in layer order.
        intermediate_size: channels ``I`` of an expert before pruning.
        widths_LE: channels that every expert keeps, int64, ``0 <= width <= I``; 0 is a removed expert.
        channels_LEI: channel scores, finite and at least 0.
        expert_prior_LE: importance that the plan gives the experts, after smoothing.
        layer_loss_L: rise of the model's loss when a layer fades, in nats per token.
        layer_prior_L: importance that the plan gives the layers, after smoothing.
        tokens_LE: calibration tokens routed to every expert, integer.
        title: heading of the picture and the page.
        summary: model, recipe, calibration and stored weights.
        facts: shown as a table, e.g. settings and versions.

    Raises:
        CoverageError: scores or importances that are NaN or infinite, or negative channel scores.
    """

    names: list[str]
    intermediate_size: int
    widths_LE: Tensor
    channels_LEI: Tensor | None = None
    expert_prior_LE: Tensor | None = None
    layer_loss_L: Tensor | None = None
    layer_prior_L: Tensor | None = None
    tokens_LE: Tensor | None = None
    title: str = ""
    summary: Summary = field(default_factory=Summary)
    facts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layers, experts = self.widths_LE.shape
        assert layers == len(self.names)
        assert layers > 0
        assert experts > 0
        assert not self.widths_LE.is_floating_point()
        assert bool(((self.widths_LE >= 0) & (self.widths_LE <= self.intermediate_size)).all())
        for tensor, shape in (
            (self.channels_LEI, (layers, experts, self.intermediate_size)),
            (self.expert_prior_LE, (layers, experts)),
            (self.tokens_LE, (layers, experts)),
            (self.layer_loss_L, (layers,)),
            (self.layer_prior_L, (layers,)),
        ):
            assert tensor is None or tensor.shape == shape, f"{tuple(tensor.shape)} is not {shape}"
        self._check_values()

    def _check_values(self) -> None:
        if self.channels_LEI is not None:
            require_non_negative(self.channels_LEI, "channel scores", ("layer", "expert"))
        if self.expert_prior_LE is not None:
            require_finite(self.expert_prior_LE, "expert importances", ("layer", "expert"))
        for values_L, what in ((self.layer_loss_L, "layer losses"), (self.layer_prior_L, "layer importances")):
            if values_L is not None:
                require_finite(values_L, what, ("layer",))

    @property
    def layers(self) -> int:
        """Number of MoE layers, ``L``."""
        return self.widths_LE.shape[0]

    @property
    def experts(self) -> int:
        """Number of experts of a layer, ``E``."""
        return self.widths_LE.shape[1]

    @cached_property
    def layer_labels(self) -> list[str]:
        """What layers are called: their numbers in the model, or else among the MoE layers."""
        found = [re.search(r"\blayers\.(\d+)\b", name) for name in self.names]
        numbers = [match[1] for match in found if match is not None]
        return numbers if len({*numbers}) == self.layers else [str(layer) for layer in range(self.layers)]

    @cached_property
    def removed_LE(self) -> Tensor:
        """Removed experts, bool."""
        return self.widths_LE.cpu() == 0

    @cached_property
    def keep_ratio_LE(self) -> Tensor:
        """Share of its channels that every expert keeps."""
        return self.widths_LE.cpu().double() / self.intermediate_size

    @property
    def keep_ratio_L(self) -> Tensor:
        """Share of its expert channels that every layer keeps."""
        return self.widths_LE.cpu().sum(-1).double() / (self.experts * self.intermediate_size)

    @property
    def keep_ratio(self) -> float:
        """Share of the expert channels that the model keeps."""
        return int(self.widths_LE.sum()) / (self.widths_LE.numel() * self.intermediate_size)

    @cached_property
    def coverage_LE(self) -> Tensor | None:
        """Share of its channel score that every expert keeps, with its best channels kept."""
        if self.channels_LEI is None:
            return None
        return _share(self._kept_LE, self._prefix_LEN[..., -1], self.keep_ratio_LE)

    @cached_property
    def coverage_L(self) -> Tensor | None:
        """Share of its channel score that every layer keeps."""
        if self.channels_LEI is None:
            return None
        return _share(self._kept_LE.sum(-1), self._prefix_LEN[..., -1].sum(-1), self.keep_ratio_L)

    @property
    def coverage(self) -> float | None:
        """Share of the channel score that the model keeps."""
        if self.channels_LEI is None:
            return None
        kept, total = self._kept_LE.sum(), self._prefix_LEN[..., -1].sum()
        return float(_share(kept, total, torch.tensor(self.keep_ratio, dtype=torch.float64)))

    @property
    def most_unequal_layer(self) -> int:
        """The layer whose widths differ most (standard deviation); the first of several."""
        return int(self.keep_ratio_LE.std(-1, correction=0).argmax())

    def score_shares(self, ends: list[int]) -> Tensor | None:
        """Distribution of the score of every expert over its channels, best first.

        Args:
            ends: rank at which every group of channels ends, ascending, the last one ``I``.

        Returns:
            ``shares_LEG`` with one group per end, summing to 1, or to 0 for an expert whose scores are all 0.
        """
        if self.channels_LEI is None:
            return None
        assert ends == sorted(ends)
        assert ends[-1] == self.intermediate_size
        sums_LEG = self._prefix_LEN[..., [0, *ends]].diff()
        total_LE1 = self._prefix_LEN[..., -1:]
        return _share(sums_LEG, total_LE1.expand_as(sums_LEG), torch.zeros_like(sums_LEG))

    @cached_property
    def _prefix_LEN(self) -> Tensor:
        assert self.channels_LEI is not None
        return prefix_scores(self.channels_LEI)

    @cached_property
    def _kept_LE(self) -> Tensor:
        return self._prefix_LEN.gather(-1, self.widths_LE.cpu().long().unsqueeze(-1)).squeeze(-1)


def channel_groups(channels: int, most: int = 8) -> list[int]:
    """Split channels into at most ``most`` groups of equal size, give or take one; returns where each group ends."""
    groups = min(most, channels)
    return [channels * (group + 1) // groups for group in range(groups)]


def _share(part: Tensor, total: Tensor, without_score: Tensor) -> Tensor:
    return torch.where(total > 0, part / total.masked_fill(total == 0, 1), without_score)
