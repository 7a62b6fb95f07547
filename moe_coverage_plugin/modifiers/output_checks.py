"""Checks of the output of a ``oneshot`` run before anything is calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compressed_tensors.distributed import is_distributed
from compressed_tensors.offload import disable_onloading
from llmcompressor.modifiers import Modifier
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.checkpoint.contents import WEIGHTS
from moe_coverage_plugin.checkpoint.staging import check_output
from moe_coverage_plugin.files.progress import progress_directory, stored_bytes
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import MoELayer, expert_linears
from moe_coverage_plugin.modifiers.attribution import AttributionModifier
from moe_coverage_plugin.modifiers.oneshot_run import running_oneshot


def check_run_output(
    model: PreTrainedModel,
    layers: Sequence[MoELayer],
    sparsity: float,
    quantized: bool,
    before: Sequence[Modifier],
    progress: float = 0.0,
) -> None:
    """Check that the checkpoint can be written where the run will write it.

    Args:
        model: the unpruned model.
        layers: the layers that will be pruned.
        sparsity: fraction of their channels that will be removed.
        quantized: whether a quantizer follows.
        before: modifiers before the pruning, which may write scores.
        progress: share of the experts' remaining weights that the run keeps beside the output until it ends.

    Raises:
        CoverageError: scores would be written into the output, the generation config cannot be saved, or see
            :func:`~moe_coverage_plugin.checkpoint.staging.check_output`.
    """
    run = running_oneshot()
    if run is None or run.output_dir is None:
        return
    output = Path(run.output_dir)
    score_files = [other.save_scores for other in before if isinstance(other, AttributionModifier)]
    for path in filter(None, score_files):
        if Path(path).resolve().parent == output.resolve() and WEIGHTS.fullmatch(Path(path).name):
            raise CoverageError(
                f"save_scores={path} is in the output {output}, where engines would load it as weights: name a file "
                "beside it, or leave save_scores out, since the checkpoint has a copy of the scores"
            )
    with disable_onloading():
        expert_bytes = sum(linear.weight.nbytes for layer in layers for linear in expert_linears(layer))
    kept_bytes = int(model_bytes(model) - expert_bytes * sparsity)
    # a lower bound, so that no run that would fit stops: four bits and scales take more than a quarter of 16
    needed_bytes = kept_bytes // 4 if quantized else kept_bytes
    if not is_distributed():
        progress_bytes = int(expert_bytes * (1 - sparsity) * progress)
        needed_bytes += max(0, progress_bytes - stored_bytes(progress_directory(output)))
    check_output(output, needed_bytes)
    _check_generation(model)


def _check_generation(model: PreTrainedModel) -> None:
    """Check what transformers checks when it saves a model, after the work.

    Raises:
        CoverageError: the generation config cannot be saved.
    """
    generation = getattr(model, "generation_config", None)
    if generation is None or not model.can_generate():
        return
    try:
        generation.validate(strict=True)
    except ValueError as error:
        cause = " ".join(str(error).split())
        raise CoverageError(
            f"transformers saves no generation_config with settings that contradict each other ({cause}): change "
            "model.generation_config, or generation_config.json beside the model"
        ) from error


def model_bytes(model: Module) -> int:
    """Return the bytes of all parameters and buffers, on whatever device they are."""
    # otherwise offloaded tensors would all be copied to their execution device
    with disable_onloading():
        return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
