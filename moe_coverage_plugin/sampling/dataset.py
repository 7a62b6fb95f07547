"""Text that a model writes itself as a data set for ``oneshot``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetInfo
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from moe_coverage_plugin.calibration.text import IDS, pack
from moe_coverage_plugin.checkpoint.opening import open_model
from moe_coverage_plugin.files.model_path import check_model
from moe_coverage_plugin.modeling.conversions import conversions_kept
from moe_coverage_plugin.options import SamplingOptions
from moe_coverage_plugin.sampling.run import sample
from moe_coverage_plugin.sampling.transformers_engine import TransformersEngine, on_accelerator


def sample_text(
    model: PreTrainedModel | str | Path, tokenizer: PreTrainedTokenizerBase | None = None, **options: Any
) -> Dataset:
    """Let a model write its own calibration text.

    The documents are drawn token by token from the model, from the start token on, or through the chat template with
    both turns, and packed into windows::

        path = "path/to/moe"
        oneshot(model=path, dataset=sample_text(path, samples=512, length=2048), recipe=..., output_dir="out")

    Args:
        model: path of a model, which is opened and closed again, or a model with linear experts, as
            ``llmcompressor.modeling.moe.linearize.load_quantizable_moe`` opens it.
        tokenizer: of the model; by default, the one beside its weights.
        options: fields of :class:`~moe_coverage_plugin.options.SamplingOptions` except ``engine``.

    Returns:
        Windows of ``input_ids``; the provenance is in the ``description`` of their ``info``, as JSON.

    Raises:
        CoverageError: the model cannot be opened; see also :func:`~moe_coverage_plugin.sampling.run.sample`.
    """
    chosen = SamplingOptions(**options)
    if not isinstance(model, PreTrainedModel):
        check_model(str(model))
        with conversions_kept():
            opened = open_model(str(model), "auto" if torch.cuda.is_available() else None)
            return sample_text(opened, tokenizer, **options)
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(model.name_or_path, trust_remote_code=False)
    engine = TransformersEngine(model, chosen.temperature, chosen.batch_size)
    with on_accelerator(model):
        sampled = sample(engine, tokenizer, model.config, chosen, model.name_or_path or "")
    length = sampled.provenance["length"]
    ids_WS = pack(Dataset.from_dict({IDS: sampled.documents}), None, IDS, length).ids_WS[: chosen.samples]
    return Dataset.from_dict({IDS: ids_WS.tolist()}, info=DatasetInfo(description=json.dumps(sampled.provenance)))
