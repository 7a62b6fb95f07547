"""Fine-tunes a pruned checkpoint and writes one of the same widths."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from moe_coverage_plugin.calibration.provenance import routers_hash
from moe_coverage_plugin.calibration.text import Text
from moe_coverage_plugin.checkpoint.loading import load
from moe_coverage_plugin.checkpoint.staging import check_output
from moe_coverage_plugin.files.atomic import check_place
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.modeling.nf4 import remove_quantization_config
from moe_coverage_plugin.options import RecoveryOptions
from moe_coverage_plugin.recovery.adapters import attach, require_peft
from moe_coverage_plugin.recovery.checks import check_arguments, check_model
from moe_coverage_plugin.recovery.experts import grouped_experts
from moe_coverage_plugin.recovery.ranks import Ranks, joined_ranks
from moe_coverage_plugin.recovery.record import Recovered, record_training
from moe_coverage_plugin.recovery.source import Source, nf4_config, read_source
from moe_coverage_plugin.recovery.state import STATE_NAME, WorkFolder
from moe_coverage_plugin.recovery.teacher import open_teacher
from moe_coverage_plugin.recovery.training import Training, held_out_loss


def finetune(
    checkpoint: str | Path,
    text: Text,
    output: str | Path,
    options: RecoveryOptions | None = None,
    *,
    evaluation: Text | None = None,
    field: str = "text",
    teacher: str | Path | None = None,
    tokenizer: str | Path | None = None,
    work: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Recovered:
    """Train adapters on a pruned checkpoint, merge them, and write a checkpoint of the same widths in 16 bit.

    Quantized weights are decompressed and frozen, and the result is in 16 bit: quantize it again. The option ``nf4``
    keeps the frozen experts in 4 bits during training. Under ``torchrun`` or ``accelerate launch`` every rank has a
    copy of the model and trains on its part of each step. An interrupted run continues if it is started again with
    the same arguments; on a CPU, the result has the same bits as that of an uninterrupted run.

    Args:
        checkpoint: directory of a pruned checkpoint.
        text: text to train on: files (text, JSON lines, Parquet, CSV), or a data set of text or ``input_ids``.
        output: directory to write; new, or without weights and config of a model.
        options: how to train.
        evaluation: text for the held-out loss; by default, the last windows of ``text``.
        field: the column of the text in files with rows and in data sets.
        teacher: directory of the unpruned model, to learn its logits; ``mode="router"`` needs it.
        tokenizer: directory of the tokenizer; by default, ``checkpoint``.
        work: folder for the state of an interrupted run, deleted at the end; by default, ``output`` with the suffix
            ``.work``.
        trust_remote_code: whether to run Python files of the checkpoint and of the teacher.

    Raises:
        CoverageError: peft is not installed; not a pruned checkpoint; too little text; an output that exists, cannot
            be written or has too little space; options that do not fit the model or the interrupted run.
    """
    require_peft()
    options = options or RecoveryOptions()
    checkpoint, output = Path(checkpoint), Path(output)
    work = Path(work) if work is not None else output.with_name(f"{output.name}.work")
    check_output(output)
    check_place(work / STATE_NAME)
    check_arguments(checkpoint, text, evaluation, teacher, options)
    source = read_source(checkpoint, text, evaluation, field, tokenizer, options)
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices), joined_ranks() as ranks:
        dtype = options.dtype and getattr(torch, options.dtype)
        model = load(checkpoint, dtype, trust_remote_code, nf4_config(checkpoint, options) if options.nf4 else None)
        check_model(model, options)
        check_output(output, _dense_bytes(model))
        folder = WorkFolder(work, _identity(source, model, options, teacher, ranks))
        folder.check()
        model.to(ranks.device)  # pyright: ignore[reportArgumentType] - a wrapped method
        guide = open_teacher(teacher, model, ranks.device, trust_remote_code) if teacher is not None else None
        recovered = _train(model, guide, source, options, ranks, folder)
        record_training(model, recovered, source, options, teacher, ranks)
        model.save_pretrained(output)
        ranks.wait()
        if ranks.first:
            folder.remove()
    return recovered


def _dense_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters in the result, where NF4 weights are in 16 bit again."""
    total = 0
    for parameter in model.parameters():
        packed = getattr(parameter, "quant_state", None)
        total += parameter.nbytes if packed is None else packed.shape.numel() * packed.dtype.itemsize
    return total


def _identity(
    source: Source, model: PreTrainedModel, options: RecoveryOptions, teacher: str | Path | None, ranks: Ranks
) -> dict[str, Any]:
    """Return the user's inputs that the bits of the result depend on."""
    # includes the widths, because the entry in config.json has them
    config = hashlib.sha256((source.path / "config.json").read_bytes()).hexdigest()
    return options.model_dump() | {
        "text_sha256": source.train.sha256,
        "evaluation_sha256": source.held_out.sha256,
        "config_sha256": config,
        "routers_sha256": routers_hash(find_moe_layers(model)),
        "teacher": None if teacher is None else str(Path(teacher).resolve()),
        "ranks": ranks.count,
    }


def _train(
    model: PreTrainedModel,
    teacher: PreTrainedModel | None,
    source: Source,
    options: RecoveryOptions,
    ranks: Ranks,
    folder: WorkFolder,
) -> Recovered:
    held_out_WS = source.held_out.ids_WS
    before = held_out_loss(model, held_out_WS, options.batch_size, ranks)
    torch.manual_seed(options.seed)
    adapters = attach(model, options)
    with ExitStack() as stack:
        stack.enter_context(grouped_experts(adapters.adapted) if adapters.adapted else nullcontext())
        if options.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            stack.callback(model.gradient_checkpointing_disable)
        training = Training(model, adapters, teacher, source.train.ids_WS, held_out_WS, options, ranks, folder)
        points = training.run(before)
    adapters.merge()
    if options.nf4:
        remove_quantization_config(model)
    after = held_out_loss(model, held_out_WS, options.batch_size, ranks)
    points.append({"step": training.steps, "held_out": after})
    return Recovered(points[0]["held_out"], after, points, ranks.first)
