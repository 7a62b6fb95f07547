"""Pruned experts whose target is the output of the unpruned ones, for the tests of the refit and of its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from moe_coverage_plugin.core.gauss_newton import Problem, Tokens, Weights
from moe_coverage_plugin.core.refit import refit


def swiglu(h_MO: Tensor) -> Tensor:
    gate_MN, up_MN = h_MO.chunk(2, dim=-1)
    return silu(gate_MN) * up_MN


def relu_squared(h_MN: Tensor) -> Tensor:
    return h_MN.relu().square()


class Rows(NamedTuple):
    """Tokens of one expert, of both sides."""

    x_MH: Tensor
    weight_M: Tensor
    held_M: Tensor


class Fit(NamedTuple):
    """Weights of one expert that are better for held-back tokens."""

    rows: list[Tensor]
    down_HN: Tensor


@dataclass
class Expert:
    """A pruned expert whose target is the output of the unpruned one, in float64; tokens alternate between sides."""

    seed: int = 2
    gated: bool = True
    biased: bool = False
    hidden: int = 5
    channels: int = 7
    kept: int = 4
    fitted: int = 40
    held: int = 20

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.act = swiglu if self.gated else relu_squared
        rows = [self.randn(self.channels, self.hidden) for _ in range(1 + self.gated)]
        biases = [self.randn(self.channels) if self.biased else None for _ in rows]
        down_HI = self.randn(self.hidden, self.channels)
        tokens = self.fitted + self.held
        held_M = torch.randperm(tokens, generator=self.generator) < self.held
        weight_M = torch.rand(tokens, dtype=torch.float64, generator=self.generator)
        self.tokens = Rows(self.randn(tokens, self.hidden), weight_M, held_M)
        self.target_MH = outputs(self, rows, biases, down_HI)
        self.rows = [each[: self.kept] for each in rows]
        self.biases = [None if each is None else each[: self.kept] for each in biases]
        self.down_HN = down_HI[:, : self.kept]

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def refit(self) -> Fit | None:
        (found,) = refit_all([self])
        return found

    def error(self, rows: list[Tensor], down_HN: Tensor, held: bool = True) -> float:
        """The sum over the tokens of one side, one token at a time."""
        output_MH = outputs(self, rows, self.biases, down_HN)
        side = [index for index, flag in enumerate(self.tokens.held_M.tolist()) if flag == held]
        left_MH = output_MH - self.target_MH
        return sum(float((self.tokens.weight_M[index] * left_MH[index]).square().sum()) for index in side)

    @property
    def unfitted_error(self) -> float:
        return self.error(self.rows, self.down_HN)


def refit_all(experts: list[Expert]) -> list[Fit | None]:
    """Fit experts of one width together."""
    rows_EOH = torch.stack([torch.cat(each.rows) for each in experts])
    biases = [torch.cat([bias for bias in each.biases if bias is not None]) for each in experts if each.biased]
    weights = Weights(
        rows_EOH, torch.stack(biases) if experts[0].biased else None, torch.stack([each.down_HN for each in experts])
    )
    found = refit(weights, problem(experts, held=False), problem(experts, held=True), experts[0].act)
    return [
        Fit(list(rows_OH.split(experts[0].kept)), down_HN) if better else None
        for rows_OH, down_HN, better in zip(found.rows_EOH, found.down_EHN, found.better_E.tolist(), strict=True)
    ]


def problem(experts: list[Expert], held: bool) -> Problem:
    """One side of the tokens of experts, with rows of zeros behind those of experts that have fewer."""
    sides = [each.tokens.held_M == held for each in experts]
    x_EMH, weight_EM, target_EMH = (
        torch.nn.utils.rnn.pad_sequence([values[side] for values, side in zip(each, sides, strict=True)], True)
        for each in zip(*((each.tokens.x_MH, each.tokens.weight_M, each.target_MH) for each in experts), strict=True)
    )
    count_E = torch.tensor([int(side.sum()) for side in sides], device=x_EMH.device)
    return Problem(Tokens(x_EMH, weight_EM, count_E), target_EMH)


def outputs(expert: Expert, rows: list[Tensor], biases: list[Tensor | None], down_HN: Tensor) -> Tensor:
    """``[M, H]``, projection by projection."""
    parts = [
        expert.tokens.x_MH.to(row.dtype) @ row.T + (0.0 if bias is None else bias)
        for row, bias in zip(rows, biases, strict=True)
    ]
    return expert.act(torch.cat(parts, dim=-1)) @ down_HN.T
