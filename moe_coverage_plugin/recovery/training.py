"""The training loop: batches, losses, optimizer and loss curve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from tqdm import tqdm
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.next_token import check_loss, next_token_loss
from moe_coverage_plugin.options import RecoveryOptions
from moe_coverage_plugin.recovery.adapters import Adapters
from moe_coverage_plugin.recovery.curve import Point
from moe_coverage_plugin.recovery.losses import LoadBalance, batch_loss
from moe_coverage_plugin.recovery.ranks import Ranks
from moe_coverage_plugin.recovery.state import WorkFolder


@dataclass
class Order:
    """Order of the windows: a new permutation in each epoch.

    It depends only on the seed and the position, so a resumed run needs no state for it.
    """

    windows: int
    seed: int
    _of_epoch: tuple[int, list[int]] = field(default=(-1, []))

    def at(self, begin: int, end: int) -> list[int]:
        """Return the indices of windows ``begin`` to ``end`` in the sequence of all epochs."""
        return [self._epoch(position // self.windows)[position % self.windows] for position in range(begin, end)]

    def _epoch(self, epoch: int) -> list[int]:
        if self._of_epoch[0] != epoch:
            generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
            self._of_epoch = (epoch, torch.randperm(self.windows, generator=generator).tolist())
        return self._of_epoch[1]


@dataclass
class Training:
    """Training of attached adapters.

    Attributes:
        model: the model with adapters, on the device of the rank.
        adapters: the adapters in it.
        teacher: the unpruned model, if its logits are learned.
        train_WS: token ids to train on.
        held_out_WS: token ids for the held-out loss.
        options: how to train.
        ranks: this process among all ranks.
        work: folder of the state to resume from.
    """

    model: PreTrainedModel
    adapters: Adapters
    teacher: PreTrainedModel | None
    train_WS: Tensor
    held_out_WS: Tensor
    options: RecoveryOptions
    ranks: Ranks
    work: WorkFolder

    @cached_property
    def windows_per_step(self) -> int:
        """Windows in one step, over all ranks."""
        return self.options.batch_size * self.options.accumulation * self.ranks.count

    @cached_property
    def steps(self) -> int:
        """Steps of the optimizer: the given number, or that of the epochs."""
        if self.options.steps is not None:
            return self.options.steps
        return max(1, round(self.options.epochs * len(self.train_WS) / self.windows_per_step))

    def rate(self, step: int) -> float:
        """Return the factor of the learning rates at a step, counted from 0: rising in the warm-up, then falling."""
        # transformers' linear schedule has a rate of 0 in the first step, and a state that resuming would have to keep
        warmup = round(self.options.warmup * self.steps)
        return (step + 1) / warmup if step < warmup else (self.steps - step) / max(1, self.steps - warmup)

    def run(self, before: float) -> list[Point]:
        """Train to the last step, from the saved state if there is one.

        Args:
            before: held-out loss without adapters.

        Returns:
            The loss curve. A point has ``step`` and either ``held_out``, or ``train``, ``rate``, ``gradient`` (norm
            before clipping), ``seconds``, ``divergence`` with a teacher, and ``balance`` if that loss has a weight.

        Raises:
            CoverageError: a loss is not finite, or the state is damaged.
        """
        options, parameters = self.options, self.adapters.parameters
        optimizer = self._optimizer()
        step, points = self.work.resume(parameters, optimizer)
        points = points or [{"step": 0, "held_out": before}]
        order = Order(len(self.train_WS), options.seed)
        balance = LoadBalance(self.adapters.layers)
        progress = tqdm(total=self.steps, initial=step, desc="Fine-tuning", disable=None if self.ranks.first else True)
        with balance.observed() if options.balance else nullcontext(), progress:
            while step < self.steps:
                begin = time.perf_counter()
                # dropout depends on the step and the rank only, so a resumed run draws the same
                torch.manual_seed((options.seed << 40) + (step << 12) + self.ranks.rank)
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * self.rate(step)
                sums = self._accumulate(order, step, balance)
                self.ranks.sum_gradients(list(parameters.values()))
                norm = clip_grad_norm_(parameters.values(), options.clip)
                optimizer.step()
                optimizer.zero_grad()
                point = {"step": step + 1, **sums, "rate": self.rate(step), "gradient": float(norm)}
                points.append(point | {"seconds": round(time.perf_counter() - begin, 4)})
                step += 1
                progress.set_postfix(loss=f"{sums['train']:.4f}")
                progress.update()
                # the point of the last step is measured on the merged model
                if step % options.evaluate_every == 0 and step < self.steps:
                    points.append({"step": step, "held_out": self.evaluate()})
                if self.ranks.first and step % options.save_every == 0:
                    self.work.save(step, parameters, optimizer, points)
        return points

    def _optimizer(self) -> AdamW:
        options = self.options
        groups: list[dict[str, Any]] = [
            {"params": list(named.values()), "peak": peak, "lr": peak}
            for named, peak in (
                (self.adapters.experts, options.expert_lr),
                (self.adapters.routers, options.router_lr),
            )
            if named
        ]
        return AdamW(groups, weight_decay=0.0)

    def _accumulate(self, order: Order, step: int, balance: LoadBalance) -> dict[str, float]:
        """Accumulate gradients of this rank's batches; return mean losses of the step over all ranks."""
        options = self.options
        batches = options.accumulation * self.ranks.count
        tokens = self.windows_per_step * (options.sequence_length - 1)
        sums = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
        self.model.train()
        for ids_BS in self._batches(order, step):
            logits_BSV = self.model(input_ids=ids_BS, use_cache=False).logits
            loss = batch_loss(logits_BSV, ids_BS, self._teacher_logits(ids_BS), options, 1 / tokens)
            check_loss(loss.nll)
            outputs, gradients = [logits_BSV], [loss.gradient_BSV]
            balance_loss = torch.zeros((), device=self.ranks.device)
            if options.balance:
                balance_loss = balance.loss()
                outputs.append(balance_loss)
                gradients.append(torch.full_like(balance_loss, options.balance / batches))
            torch.autograd.backward(outputs, gradients)
            balance.clear()
            parts = (loss.nll / tokens, loss.divergence / tokens, balance_loss.detach().double() / batches)
            sums += torch.stack(parts)
        self.model.eval()
        nll, divergence, unevenness = self.ranks.sum(sums).tolist()
        means = {"train": nll}
        if self.teacher is not None:
            means["divergence"] = divergence
        if options.balance:
            means["balance"] = unevenness
        return means

    def _batches(self, order: Order, step: int) -> Iterator[Tensor]:
        """Yield this rank's batches of a step: every ``count``-th batch of the step."""
        size, begin = self.options.batch_size, step * self.windows_per_step
        for index in range(self.ranks.rank, self.options.accumulation * self.ranks.count, self.ranks.count):
            chosen = order.at(begin + index * size, begin + (index + 1) * size)
            yield self.train_WS[chosen].to(self.ranks.device)

    @torch.no_grad()
    def _teacher_logits(self, ids_BS: Tensor) -> Tensor | None:
        return None if self.teacher is None else self.teacher(input_ids=ids_BS, use_cache=False).logits

    def evaluate(self) -> float:
        """Return the mean next-token loss on the held-out text, in nats."""
        return held_out_loss(self.model, self.held_out_WS, self.options.batch_size, self.ranks)


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, ids_WS: Tensor, batch_size: int, ranks: Ranks) -> float:
    """Return the mean next-token loss of windows ``[W, S]``, in nats; every rank computes a part of the batches."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for ids_BS in ids_WS.split(batch_size)[ranks.rank :: ranks.count]:
        loss, count = next_token_loss(model, {"input_ids": ids_BS})
        sums += torch.stack([loss.to(sums), torch.tensor(count).to(sums)])
    loss, count = ranks.sum(sums).tolist()
    return loss / count
