"""The compared jobs: this package's recommended recipe, the toolkit's REAP and GPTQ, and a plain forward pass."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.offload import get_execution_device
from datasets import Dataset
from llmcompressor import oneshot  # pyright: ignore[reportPrivateImportUsage] - the documented import
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning.reap.base import REAPPruningModifier
from llmcompressor.utils.helpers import disable_cache, disable_lm_head, eval_context
from transformers import PreTrainedModel

from benchmarks.whole_job.budget import compare_plans, limit_gpu_memory
from benchmarks.whole_job.checkpoint import is_complete, write_checkpoint
from benchmarks.whole_job.hooks import timed
from benchmarks.whole_job.needs import checkpoint_bytes, compressed_bytes
from benchmarks.whole_job.record import Recorder
from benchmarks.whole_job.shapes import Shape
from moe_coverage_plugin import AttributionModifier, recommended_recipe
from moe_coverage_plugin.checkpoint.opening import open_model
from moe_coverage_plugin.cli.compression import offload_folder
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.compute_dtype import fast_compute_dtype
from moe_coverage_plugin.modeling.grouped_experts import grouped_experts
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers

SPARSITY, BLOCK, SCHEME = 0.25, 128, "W4A16"
OPENING, FORWARD = "opening", "plain forward"
SOURCE, OURS = "model", "ours"
# place of the weights that is no device map
HOST = "cpu"
# phases of the command line
CHECKPOINT, SERVING = "checkpoint", "serving"
OWN, BESIDE = ("opening", "forward", "scores", "compression"), ("reap", "gptq")
TAIL_CHARACTERS = 3000


@dataclass(frozen=True)
class Work:
    """What all jobs of a command have in common.

    Attributes:
        directory: directory of the checkpoint, the scores and the results.
        shape: the model.
        samples: calibration samples.
        length: tokens of a sample.
        batch_size: samples of a batch.
        seed: seed of weights and tokens.
        device_map: place of the weights in this package's job, as ``moe-coverage oneshot --device-map``.
        serve_python: interpreter of the environment with vLLM.
        serve_options: options of ``vllm.LLM``.
        gpu_memory: limit of GPU memory in GiB of this package's job.
        bits: bits of the weights that this package's job writes, 4 or 16.
    """

    directory: Path
    shape: Shape
    samples: int
    length: int
    batch_size: int
    seed: int
    device_map: str | None
    serve_python: str | None
    serve_options: dict[str, Any]
    gpu_memory: float | None = None
    bits: int = 4

    @property
    def name(self) -> str:
        """Name of this package's job, and of its checkpoint."""
        return f"{OURS}{self._limit}" + "-16bit" * (self.bits == 16)

    @property
    def scores(self) -> Path:
        """Its score file, which does not depend on the bits."""
        return self.directory / f"scores{self._limit}.safetensors"

    @property
    def _limit(self) -> str:
        return "" if self.gpu_memory is None else f"-{self.gpu_memory:g}GiB-{self.device_map or HOST}"

    @property
    def source(self) -> Path:
        """The checkpoint to compress."""
        if not is_complete(self.directory / SOURCE):
            raise CoverageError(f"{self.directory} has no complete checkpoint: run --phases {CHECKPOINT} first")
        return self.directory / SOURCE

    def tokens(self) -> torch.Tensor:
        """Random token ids ``[samples, length]``."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        vocabulary = self.shape.config["vocab_size"]
        return torch.randint(2, vocabulary, (self.samples, self.length), generator=generator)

    def calibration(self) -> dict[str, Any]:
        """Options of ``oneshot`` that are the same for all jobs."""
        return {
            "dataset": Dataset.from_dict({"input_ids": self.tokens().numpy()}),
            "num_calibration_samples": self.samples,
            "max_seq_length": self.length,
            "batch_size": self.batch_size,
            "shuffle_calibration_samples": False,
            # the toolkit's default shows all tokens to each expert, which takes it several times as long
            "moe_calibrate_all_experts": False,
        }


def run_phase_group(phases: list[str], work: Work, recorder: Recorder) -> None:
    """Run phases of one job in this process.

    Raises:
        CoverageError: files of an earlier phase are missing.
    """
    if phases == [CHECKPOINT]:
        _write(work, recorder)
    elif phases == [SERVING]:
        _serve(work, recorder)
    elif phases[0] in BESIDE:
        (name,) = phases
        _toolkit(name, work, recorder)
    else:
        _ours(phases, work, recorder)


def _write(work: Work, recorder: Recorder) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with recorder.phase("writing random weights"):
        reserve = int(compressed_bytes(work.shape.config, SPARSITY))
        write_checkpoint(work.directory / SOURCE, work.shape, work.seed, device, reserve)
    recorder.note(checkpoint_bytes=_weight_bytes(work.source), computed_bytes=checkpoint_bytes(work.shape.config))


def _ours(phases: list[str], work: Work, recorder: Recorder) -> None:
    output = work.directory / work.name
    if "compression" in phases and "scores" not in phases and not work.scores.is_file():
        raise CoverageError(
            f"{work.directory} has no {work.scores.name}: run --phases scores first, or scores,compression"
        )
    if work.gpu_memory is not None:
        limit_gpu_memory(work.gpu_memory)
    with offload_folder(output, work.device_map) as folder:
        with recorder.phase(OPENING):
            model = open_model(str(work.source), work.device_map, folder)
        if "forward" in phases and work.gpu_memory is None:
            plain_forward(model, work, recorder)
        elif "forward" in phases:
            recorder.note(left_out="the plain forward was left out, because each batch would load all weights")
        _prune(model, phases, work, recorder, output)


def _prune(model: PreTrainedModel, phases: list[str], work: Work, recorder: Recorder, output: Path) -> None:
    scheme = SCHEME if work.bits == 4 else None
    recipe = recommended_recipe(SPARSITY, BLOCK, scheme=scheme, ignore=work.shape.ignore)
    assert isinstance(recipe[0], AttributionModifier)
    recipe[0] = AttributionModifier(save_scores=str(work.scores))
    options: dict[str, Any] = {}
    if "compression" in phases:
        # until it finds what a killed run has kept
        recorder.note(resumed=False)
        shutil.rmtree(output, ignore_errors=True)
        options = {"output_dir": str(output)}
        if "scores" not in phases:
            recipe[0] = AttributionModifier(scores=str(work.scores))
    elif "scores" in phases:
        recipe = recipe[:1]
    else:
        return
    with timed(recorder, saves=bool(options)):
        oneshot(model=model, recipe=recipe, **work.calibration(), **options)
    if options:
        recorder.note(stored_bytes=_weight_bytes(output))
        if work.gpu_memory is not None:
            recorder.note(plan_equals=compare_plans(work.directory / OURS, output))


def _toolkit(name: str, work: Work, recorder: Recorder) -> None:
    output = work.directory / name
    shutil.rmtree(output, ignore_errors=True)
    # the router is a linear layer in some families
    ignore = ["lm_head", r"re:.*mlp\.gate$", *work.shape.ignore]
    recipe: list[Modifier] = [GPTQModifier(targets=["Linear"], scheme=SCHEME, ignore=ignore)]
    if name == "reap":
        recipe.insert(0, REAPPruningModifier(sparsity=SPARSITY))
    with recorder.phase(OPENING):
        # its pass moves layers to the card one by one
        model = open_model(str(work.source), None)
    try:
        with timed(recorder, saves=True):
            oneshot(model=model, recipe=recipe, output_dir=str(output), **work.calibration())
        recorder.note(stored_bytes=_weight_bytes(output))
    finally:
        # only its time is compared, and the disk may have no room for another checkpoint
        shutil.rmtree(output, ignore_errors=True)


def plain_forward(model: PreTrainedModel, work: Work, recorder: Recorder) -> None:
    """Take all tokens through the decoder layers, without observing anything: the unit of ratios.

    Experts are computed together, as in this package's passes.
    """
    layers = find_moe_layers(model)
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(grouped_experts(layer, None, lambda _: None))
        for context in (fast_compute_dtype, disable_cache, eval_context, disable_lm_head):
            stack.enter_context(context(model))
        stack.enter_context(torch.inference_mode())
        batches, device = work.tokens().split(work.batch_size), get_execution_device(model)
        # compiles and loads kernels
        model(input_ids=batches[0].to(device))
        with recorder.phase(FORWARD):
            for index, ids_BS in enumerate(batches):
                recorder.progress(index, len(batches))
                model(input_ids=ids_BS.to(device))


def _serve(work: Work, recorder: Recorder) -> None:
    if work.serve_python is None:
        recorder.note(left_out="opening in vLLM was left out, because --serve-python names no interpreter")
        return
    checkpoint = work.directory / work.name
    if not (checkpoint / "config.json").is_file():
        raise CoverageError(f"{work.directory} has no compressed checkpoint: run --phases compression first")
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", work.directory / "serving.log"
        # in the engine's own process, memory can be measured
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | os.environ
        arguments = [str(checkpoint), str(result), json.dumps(work.serve_options), str(work.seed)]
        command = [work.serve_python, "-m", "benchmarks.whole_job.serve", *arguments]
        with log.open("w") as stream:
            code = subprocess.run(command, env=variables, stdout=stream, stderr=stream, check=False).returncode
        # written last, so it is complete even if the engine then fails to stop
        if not result.exists():
            raise RuntimeError(f"vLLM exited with status {code}: {log.read_text()[-TAIL_CHARACTERS:]}")
        measured = json.loads(result.read_text())
    for phase in measured.pop("phases"):
        recorder.add(phase)
    recorder.note(**measured)


def _weight_bytes(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))
