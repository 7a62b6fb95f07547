"""Measures a setting: compresses a fresh copy of the model with the toolkit, and returns its bytes and its loss."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from datasets import Dataset
from llmcompressor import oneshot  # pyright: ignore[reportPrivateImportUsage] - the documented import
from llmcompressor.modeling.moe.linearize import linearize_moe
from torch import Tensor
from torch.nn.functional import kl_div, nll_loss
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.allocation.experts import remove_least_used, removed, set_top_k
from benchmarks.allocation.recipes import Modifiers, quantizer
from benchmarks.allocation.sizes import checkpoint_bytes, ideal_sparse_bytes
from benchmarks.allocation.tables import TOP_K, Setting
from benchmarks.allocation.text import Windows
from moe_coverage_plugin.calibration.next_token import next_token_loss
from moe_coverage_plugin.files.scores import load_scores
from moe_coverage_plugin.modeling.causal_mask import mark_causal_attention, unmark_causal_attention
from moe_coverage_plugin.options import NLL_IMPORTANCES

BATCH = 8
EVALUATION_BATCH = 24
"""Windows per batch: large, because launching the kernels of small experts takes most of the time."""

# modifiers that need a calibration; the others of this package read a score file
CALIBRATES = ("REAPPruningModifier", "WandaPruningModifier", "GPTQModifier", "LayerwiseGPTQModifier")
# every score file has the numbers of routed tokens, so the cheapest metric is sufficient
USAGE: dict[str, Any] = {"channel_metric": "activation", "layer_noise": None}


@dataclass(frozen=True)
class Measurement:
    """Results of one setting, with the field names of :class:`benchmarks.allocation.rows.Row`."""

    bytes: int
    sparse_bytes: int | None
    loss: float
    losses: dict[str, float]
    removed: float
    removed_experts: int
    divergences: dict[str, float]


def score_fields(setting: Setting) -> dict[str, Any] | None:
    """Return the fields of the ``AttributionModifier`` that measures what a setting needs, ``None`` for nothing."""
    wanted = setting.recipe.modifiers.get("AttributionModifier")
    if setting.recipe.drop_least_used is not None:
        wanted = USAGE
    if wanted is None:
        return None
    # every file has all importances in closed form, and one backward pass computes all that need gradients
    fields = {name: value for name, value in wanted.items() if name != "expert_importance"}
    if wanted.get("expert_importance") in NLL_IMPORTANCES:
        fields["expert_importance"] = NLL_IMPORTANCES[0]
    return fields


def score_path(folder: Path, setting: Setting, calibration: Windows) -> Path | None:
    """Return where a setting's scores are kept, ``None`` if it needs none."""
    fields = score_fields(setting)
    if fields is None:
        return None
    return folder / f"{'-'.join(map(str, (*fields.values(), calibration.sha256)))}.safetensors"


def open_linear(path: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Open the model with linear experts, as ``oneshot`` does; it is copied for every setting."""
    # the model is moved to the device first, because linear experts compute on the device they were created on
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map=device)
    linearize_moe(model)
    model.config.use_cache = False
    return model.eval()


@dataclass
class Bench:
    """A model and the texts on which its loss is measured.

    Attributes:
        pristine: unpruned model on ``device`` with linear experts; only its copies are compressed.
        tokenizer: tokenizer of the model.
        evaluation: evaluation windows by the name of their text.
        device: device to compute on.
        folder: directory for score files; those that are there already are taken.
        scoring_seconds: seconds that each score file took here.
    """

    pristine: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    evaluation: dict[str, Windows]
    device: torch.device
    folder: Path
    scoring_seconds: dict[Path, float] = field(default_factory=dict)

    def measure(self, setting: Setting, calibration: Windows, seed: int) -> Measurement:
        """Compress a copy of the model and measure it.

        Raises:
            CoverageError: if this package cannot apply the setting.
            ValueError: if the toolkit cannot apply it.
        """
        torch.manual_seed(seed)
        model = self.compress(setting, calibration)
        if setting.top_k is not None:
            set_top_k(model, TOP_K[setting.top_k])
        removed_share, removed_experts = removed(model, self.pristine)
        wanda = "WandaPruningModifier" in setting.recipe.modifiers
        sparse_bytes = ideal_sparse_bytes(model) if wanda else None
        found = {name: deviation(model, self.pristine, text.ids_WS) for name, text in self.evaluation.items()}
        losses = {name: each.loss for name, each in found.items()}
        loss = sum(losses.values()) / len(losses)
        divergences = {name: each.divergence for name, each in found.items()}
        size = checkpoint_bytes(model)
        return Measurement(size, sparse_bytes, loss, losses, removed_share, removed_experts, divergences)

    def score_file(self, setting: Setting, calibration: Windows) -> Path | None:
        """Return the score file that a setting needs, measured if it does not exist; ``None`` if it needs none."""
        path, fields = score_path(self.folder, setting, calibration), score_fields(setting)
        if path is None or fields is None:
            return None
        if path.exists():
            self.scoring_seconds.setdefault(path, 0.0)
        else:
            start = time.perf_counter()
            self._oneshot(self._copy(), {"AttributionModifier": fields | {"save_scores": str(path)}}, calibration)
            self.scoring_seconds[path] = time.perf_counter() - start
        return path

    def compress(self, setting: Setting, calibration: Windows) -> PreTrainedModel:
        """Return a pruned and quantized copy of the model; the top-k of its routers is unchanged."""
        model = self._copy()
        modifiers = copy.deepcopy(setting.recipe.modifiers) | quantizer(setting.bits, setting.rounding)
        scores = self.score_file(setting, calibration)
        if scores is not None and "AttributionModifier" in modifiers:
            modifiers["AttributionModifier"]["scores"] = str(scores)
        if setting.recipe.drop_least_used is not None:
            assert scores is not None
            tokens_LE = load_scores(scores)[0].tokens_LE
            remove_least_used(model, tokens_LE, setting.sparsity, setting.recipe.drop_least_used)
        reconstruct = modifiers.get("ChannelPruningModifier", {}).get("reconstruct", False)
        calibrates = reconstruct or any(name in modifiers for name in CALIBRATES)
        if modifiers:
            self._oneshot(model, modifiers, calibration if calibrates else None)
        return model

    def _copy(self) -> PreTrainedModel:
        return copy.deepcopy(self.pristine)

    def _oneshot(self, model: PreTrainedModel, modifiers: Modifiers, calibration: Windows | None) -> None:
        recipe = yaml.safe_dump({"prune_stage": {"prune_modifiers": modifiers}}, sort_keys=False)
        data: dict[str, Any] = {}
        if calibration is not None:
            rows = calibration.ids_WS.tolist()
            data = {"dataset": Dataset.from_dict({"input_ids": rows}), "num_calibration_samples": len(rows)}
        # the toolkit calibrates REAP and Wanda with attention to later tokens unless attention is marked as causal
        mark_causal_attention(model)
        oneshot(
            model=model,
            tokenizer=self.tokenizer,
            recipe=recipe,
            batch_size=BATCH,
            shuffle_calibration_samples=False,
            moe_calibrate_all_experts=False,
            sequential_offload_device=str(self.device),
            **data,
        )
        unmark_causal_attention(model)


@torch.inference_mode()
def mean_loss(model: PreTrainedModel, ids_WS: Tensor) -> float:
    """Mean next-token loss inside the windows, nats."""
    total, tokens = 0.0, 0
    for rows in ids_WS.split(EVALUATION_BATCH):
        loss, count = next_token_loss(model, {"input_ids": rows})
        total, tokens = total + float(loss), tokens + count
    return total / tokens


class Deviation(NamedTuple):
    """Loss of a model, and its distance from the unpruned one.

    Attributes:
        loss: see :func:`mean_loss`.
        divergence: mean Kullback-Leibler divergence of its predictions from those of the unpruned model, nats.
    """

    loss: float
    divergence: float


@torch.inference_mode()
def deviation(model: PreTrainedModel, unpruned: PreTrainedModel, ids_WS: Tensor) -> Deviation:
    """Measure loss and divergence together, so that each model computes once."""
    loss, divergence = 0.0, 0.0
    for rows in ids_WS.to(model.device).split(EVALUATION_BATCH):
        log_probs_NV, expected_NV = (_log_probs(each, rows[:, :-1]) for each in (model, unpruned))
        loss += float(nll_loss(log_probs_NV, rows[:, 1:].flatten(), reduction="none").double().sum())
        divergence_N = kl_div(log_probs_NV, expected_NV, reduction="none", log_target=True).sum(-1)
        divergence += float(divergence_N.double().sum())
    tokens = ids_WS[:, 1:].numel()
    return Deviation(loss / tokens, divergence / tokens)


def _log_probs(model: PreTrainedModel, ids_WS: Tensor) -> Tensor:
    return model(input_ids=ids_WS).logits.float().log_softmax(-1).flatten(0, 1)
