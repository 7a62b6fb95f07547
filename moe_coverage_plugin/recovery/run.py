"""A whole fine-tuning: checks, a pruned checkpoint in, a pruned checkpoint out."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from moe_coverage_plugin.calibration.provenance import environment, routers_hash
from moe_coverage_plugin.checkpoint.loading import load
from moe_coverage_plugin.checkpoint.model_card import TRAINED_KEY
from moe_coverage_plugin.checkpoint.saving import check_output, record_of
from moe_coverage_plugin.files.atomic import check_place
from moe_coverage_plugin.files.scores import copy_scores
from moe_coverage_plugin.files.tokenizer import has_tokenizer
from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest, read_json
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers
from moe_coverage_plugin.modeling.nf4 import check_config, forget_quantization
from moe_coverage_plugin.options import RecoveryOptions
from moe_coverage_plugin.recovery.adapters import attach, require_peft
from moe_coverage_plugin.recovery.curve import CURVE_NAME, Point, draw_points, write_points
from moe_coverage_plugin.recovery.experts import grouped_experts
from moe_coverage_plugin.recovery.ranks import Ranks, joined_ranks
from moe_coverage_plugin.recovery.state import STATE_NAME, WorkFolder
from moe_coverage_plugin.recovery.text import Text, Windows, check_files, pack, split
from moe_coverage_plugin.recovery.training import Training, held_out_loss

# matches the beginning of a module's name, if that is no projection of an expert
NO_EXPERT = r"(?!.*\.experts\.\d+\.)"


@dataclass(frozen=True)
class Recovered:
    """What a fine-tuning did.

    Attributes:
        before, after: mean next-token loss on the held-out text, of the checkpoints that were read and written, nats.
        points: the loss curve, as it stands in the file beside the result.
        writes: whether this process is the one that wrote it, of several ranks.
    """

    before: float
    after: float
    points: list[Point]
    writes: bool

    @property
    def steps(self) -> int:
        """Steps of the optimizer."""
        return self.points[-1]["step"]


@dataclass(frozen=True)
class _Source:
    """A pruned checkpoint that may be fine-tuned, and the text for it."""

    path: Path
    quantized: bool
    tokenizer: PreTrainedTokenizerBase | None
    train: Windows
    held_out: Windows


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

    Quantized weights are decompressed first, stay frozen, and come out in 16 bit: quantize the result again. The
    option ``nf4`` holds experts in 4 bits meanwhile. Under ``torchrun`` or ``accelerate launch`` every rank holds the
    model and trains on its part of each step. A run that was interrupted goes on when it is started again with the
    same arguments; on a CPU it ends with the same bits.

    Args:
        text: files of text or JSON lines, or a data set of text or ``input_ids``, to train on.
        output: directory for the result, which must not exist or be empty.
        evaluation: other text for the loss curve; the last windows of ``text`` where not given.
        field: what holds the text in JSON lines and data sets.
        teacher: the unpruned model, whose logits are to be met; needed for ``mode="router"``.
        tokenizer: where it lies, if not in the checkpoint.
        work: folder for the state of an interrupted run, removed at the end; beside ``output`` where not given.
        trust_remote_code: as in :func:`moe_coverage_plugin.load`, for the teacher too.

    Raises:
        CoverageError: peft is missing, no pruned checkpoint, too little text, an output that is taken, options that
            fit neither the model nor the interrupted run, places where nothing can be written or too little.
    """
    require_peft()
    options = options or RecoveryOptions()
    checkpoint, output = Path(checkpoint), Path(output)
    work = Path(work) if work is not None else output.with_name(f"{output.name}.work")
    check_output(output)
    check_place(work / STATE_NAME)
    _check(checkpoint, options, text, evaluation, teacher)
    source = _read(checkpoint, options, text, evaluation, field, tokenizer)
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices), joined_ranks() as ranks:
        dtype = options.dtype and getattr(torch, options.dtype)
        model = load(checkpoint, dtype, trust_remote_code, _nf4(checkpoint, options) if options.nf4 else None)
        _check_model(model, options)
        check_output(output, _dense_bytes(model))
        folder = WorkFolder(work, _identity(source, model, options, teacher, ranks))
        folder.check()
        model.to(ranks.device)  # pyright: ignore[reportArgumentType] - a wrapped method
        guide = _open_teacher(teacher, model, trust_remote_code, ranks) if teacher is not None else None
        recovered = _train(model, guide, source, options, ranks, folder)
        _record(model, recovered, source, options, teacher, ranks)
        model.save_pretrained(output)
        ranks.wait()
        if ranks.first:
            folder.remove()
    return recovered


def _check(
    checkpoint: Path, options: RecoveryOptions, text: Text, evaluation: Text | None, teacher: str | Path | None
) -> None:
    if not (checkpoint / "config.json").is_file() or (manifest := Manifest.from_checkpoint(checkpoint)) is None:
        raise CoverageError(
            f"{checkpoint} is no pruned checkpoint ({CONFIG_KEY} is not in its config.json): prune the model first"
        )
    if manifest.layout == "padded":
        raise CoverageError(
            f"{checkpoint} has layout 'padded', whose zero channels training would fill: fine-tune a checkpoint of "
            "layout 'ragged' or 'uniform'"
        )
    if options.nf4:
        quantized = bool(_config_and_quantization(checkpoint).get("config_groups"))
        check_config(_nf4(checkpoint, options), checkpoint, quantized)
        if options.mode == "router":
            raise CoverageError("mode='router' trains no expert, and nf4 would round them all: leave nf4 out")
    for each in (text, evaluation):
        if each is not None:
            check_files(each)
    if options.mode == "router" and teacher is None:
        raise CoverageError("mode='router' trains against the unpruned model's logits: name that model as teacher")
    if teacher is not None and not (Path(teacher) / "config.json").is_file():
        raise CoverageError(f"teacher {teacher} is no checkpoint: name the directory of the unpruned model")
    if teacher is not None and CONFIG_KEY in _config_and_quantization(Path(teacher)):
        raise CoverageError(f"teacher {teacher} is pruned itself: name the directory of the unpruned model")


def _nf4(checkpoint: Path, options: RecoveryOptions) -> BitsAndBytesConfig:
    """Experts in 4 bits, which compute in the dtype of the rest."""
    dtype = options.dtype or read_json(checkpoint / "config.json").get("dtype")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=getattr(torch, str(dtype), None),
        llm_int8_skip_modules=[NO_EXPERT],
    )


def _config_and_quantization(directory: Path) -> dict[str, Any]:
    config = read_json(directory / "config.json")
    return config | dict(config.get("quantization_config") or {})


def _read(
    checkpoint: Path,
    options: RecoveryOptions,
    text: Text,
    evaluation: Text | None,
    field: str,
    tokenizer: str | Path | None,
) -> _Source:
    reader = _open_tokenizer(Path(tokenizer) if tokenizer is not None else checkpoint)
    train, held_out = pack(text, reader, field, options.sequence_length), None
    if evaluation is None:
        train, held_out = split(train, options.held_out)
    else:
        held_out = pack(evaluation, reader, field, options.sequence_length)
    quantized = bool((read_json(checkpoint / "config.json").get("quantization_config") or {}).get("config_groups"))
    if quantized:
        logger.info(
            f"{checkpoint} is quantized: its weights are decompressed and stay frozen, and the result is a 16-bit "
            "checkpoint, to be quantized again"
        )
    return _Source(checkpoint, quantized, reader, train, held_out)


def _open_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    if not has_tokenizer(directory):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise CoverageError(f"the tokenizer of {directory} cannot be opened ({error}): name another one") from error


def _check_model(model: PreTrainedModel, options: RecoveryOptions) -> None:
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and options.sequence_length > longest:
        raise CoverageError(
            f"option sequence_length={options.sequence_length} of fine-tuning exceeds the model's {longest} "
            "positions: give at most as many"
        )
    if model.dtype == torch.float16:
        raise CoverageError(
            "the checkpoint is in float16, in which gradients of single tokens vanish: fine-tune it with "
            "dtype='bfloat16'"
        )
    if options.checkpointing and not model.supports_gradient_checkpointing:
        raise CoverageError(
            f"{type(model).__name__} cannot compute activations a second time: leave out checkpointing, and give a "
            "smaller batch_size if memory is short"
        )


def _dense_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters in the result, whose weights are not held in 4 bits."""
    total = 0
    for parameter in model.parameters():
        packed = getattr(parameter, "quant_state", None)
        total += parameter.nbytes if packed is None else packed.shape.numel() * packed.dtype.itemsize
    return total


def _identity(
    source: _Source, model: PreTrainedModel, options: RecoveryOptions, teacher: str | Path | None, ranks: Ranks
) -> dict[str, Any]:
    """What decides the bits of a run, as far as its user does."""
    # the entry in it has the hash of all widths
    config = hashlib.sha256((source.path / "config.json").read_bytes()).hexdigest()
    return options.model_dump() | {
        "text_sha256": source.train.sha256,
        "evaluation_sha256": source.held_out.sha256,
        "config_sha256": config,
        "routers_sha256": routers_hash(find_moe_layers(model)),
        "teacher": None if teacher is None else str(Path(teacher).resolve()),
        "ranks": ranks.count,
    }


def _open_teacher(
    teacher: str | Path, model: PreTrainedModel, trust_remote_code: bool, ranks: Ranks
) -> PreTrainedModel:
    try:
        guide = AutoModelForCausalLM.from_pretrained(
            teacher, dtype=model.dtype, trust_remote_code=trust_remote_code
        ).eval()
    except (OSError, ValueError, KeyError) as error:
        raise CoverageError(f"teacher {teacher} cannot be opened ({error}): name the unpruned model") from error
    sizes = [each.config.get_text_config().vocab_size for each in (guide, model)]
    if sizes[0] != sizes[1]:
        raise CoverageError(
            f"teacher {teacher} has a vocabulary of {sizes[0]} and the pruned model one of {sizes[1]}: name the model "
            "that was pruned"
        )
    guide.requires_grad_(False)
    return guide.to(ranks.device)  # pyright: ignore[reportArgumentType] - a wrapped method


def _train(
    model: PreTrainedModel,
    guide: PreTrainedModel | None,
    source: _Source,
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
        training = Training(model, adapters, guide, source.train.ids_WS, held_out_WS, options, ranks, folder)
        points = training.run(before)
    adapters.merge()
    if options.nf4:
        forget_quantization(model)
    after = held_out_loss(model, held_out_WS, options.batch_size, ranks)
    points.append({"step": training.steps, "held_out": after})
    return Recovered(points[0]["held_out"], after, points, ranks.first)


def _trained_on(options: RecoveryOptions) -> str:
    return "16-bit weights, those of experts rounded to NF4" if options.nf4 else "16-bit weights"


def _record(
    model: PreTrainedModel,
    recovered: Recovered,
    source: _Source,
    options: RecoveryOptions,
    teacher: str | Path | None,
    ranks: Ranks,
) -> None:
    """Let the checkpoint tell of the fine-tuning, and keep what lay beside the one that was read."""
    told = {
        "text": source.train.source,
        "text_windows": len(source.train.ids_WS),
        "text_sha256": source.train.sha256,
        "evaluation": source.held_out.source,
        "evaluation_sha256": source.held_out.sha256,
        "teacher": None if teacher is None else str(teacher),
        "trained_on": "decompressed quantized weights" if source.quantized else _trained_on(options),
        "ranks": ranks.count,
        "steps": recovered.steps,
        "held_out_loss": [recovered.before, recovered.after],
        "options": options.model_dump(),
        "versions": environment()["versions"] | {"peft": version("peft")},
    }
    record = record_of(model)
    earlier = record.report.get(TRAINED_KEY, [])
    # a model may be fine-tuned more than once
    record.report[TRAINED_KEY] = [*earlier, told | {"curve": CURVE_NAME}]
    record.provenance[TRAINED_KEY] = [*record.provenance.get(TRAINED_KEY, []), told]

    def write(directory: Path) -> None:
        write_points(directory, recovered.points)
        draw_points(directory, recovered.points)
        copy_scores(source.path, directory)
        if source.tokenizer is not None:
            source.tokenizer.save_pretrained(directory)

    record.companions.append(write)
