"""Times functions of this package and of the toolkit from outside: they are wrapped for the duration of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from typing import Any
from unittest.mock import patch

from llmcompressor.core import active_session
from llmcompressor.core.session import CompressionSession
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning.reap.base import REAPPruningModifier
from llmcompressor.pipelines.sequential.pipeline import SequentialPipeline

from benchmarks.whole_job.record import Recorder
from moe_coverage_plugin import AlignmentModifier, CoverageModifier
from moe_coverage_plugin.calibration import interactions, layerwise, layerwise_gradients, observation
from moe_coverage_plugin.files.progress import Progress
from moe_coverage_plugin.modifiers import channel_pruning, reconstruction_pass
from moe_coverage_plugin.modifiers.kept_layers import KeptLayers
from moe_coverage_plugin.modifiers.layerwise_gptq import LayerwiseGPTQModifier

SAVING, CHECKS, GRADIENTS, INTERACTIONS, PLAN = "saving", "checks", "gradient pass", "channel interactions", "plan"
RECONSTRUCTION = "reconstruction and quantization"
PROGRESS = "progress of the run"
# owner of a function, its name, and the phase that its calls are
PHASES: tuple[tuple[Any, str, str], ...] = (
    (CompressionSession, "initialize", CHECKS),
    (observation, "observe_batches", GRADIENTS),
    (interactions, "interaction_scores", INTERACTIONS),
    (CoverageModifier, "on_calibration_end", PLAN),
    (AlignmentModifier, "on_calibration_end", "alignment"),
    (channel_pruning, "reconstruct_layers", RECONSTRUCTION),
)
# a function of this name hides the module
ONESHOT = import_module("llmcompressor.entrypoints.oneshot")
# the same for the parts of a phase
PARTS: tuple[tuple[Any, str, str], ...] = (
    (layerwise, "_first_states", "inputs of the first layer"),
    (layerwise.DecoderStep, "observe", "forward up to the experts"),
    (layerwise.DecoderStep, "finish", "forward behind the change"),
    (interactions, "channel_grams", "Gram matrices"),
    (interactions, "pooled_curvature", "curvature"),
    (interactions, "obs_scores", "order of removal"),
    (reconstruction_pass, "channel_grams", "Gram matrices"),
    (reconstruction_pass._Reconstruction, "_fit", "fits"),
    (reconstruction_pass, "prune_experts", "slicing"),
    (LayerwiseGPTQModifier, "quantize_experts", "Hessian matrices of experts"),
    (LayerwiseGPTQModifier, "_quantize", "GPTQ"),
    # what the pass waits for: copies of a layer, and the thread that writes the layer before it
    (KeptLayers, "load", PROGRESS),
    (KeptLayers, "save", PROGRESS),
    (KeptLayers, "finish", PROGRESS),
)
TOOLKIT = {"REAPPruningModifier": "pruning by REAP", "GPTQModifier": "quantization by GPTQ"}


@contextmanager
def timed(recorder: Recorder, saves: bool) -> Iterator[None]:
    """Record the phases of a ``oneshot`` call, and their progress by decoder layers and batches.

    Args:
        recorder: writes them.
        saves: whether the call writes a checkpoint.
    """
    with ExitStack() as stack:

        def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
            # a missing name is an error, so that no phase is left out silently
            stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))

        for owner, name, title in PHASES:
            replace(owner, name, _recorded(recorder.phase, title))
        for owner, name, title in PARTS:
            replace(owner, name, _recorded(recorder.part, title))
        if saves:
            replace(ONESHOT, "post_process", _recorded(recorder.phase, SAVING))
        replace(SequentialPipeline, "__call__", _pipeline(recorder))
        replace(layerwise, "with_progress", _counted(recorder))
        replace(observation, "with_progress", _counted(recorder))
        replace(layerwise_gradients, "with_progress", _counted(recorder))
        for name in ("load", "kept"):
            replace(Progress, name, _found(recorder))
        for modifier in (REAPPruningModifier, GPTQModifier):
            replace(modifier, "on_sequential_epoch_end", _layers(recorder))
        yield


def _recorded(span: Callable[[str], Any], title: str) -> Callable[[Callable[..., Any]], Any]:
    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with span(title):
                return function(*args, **kwargs)

        return call

    return make


def _pipeline(recorder: Recorder) -> Callable[[Callable[..., Any]], Any]:
    """Record the toolkit's own passes by the modifier that has the pass."""

    def make(function: Callable[..., Any]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            (modifier,) = active_session().lifecycle.recipe.modifiers
            name = type(modifier).__name__
            with recorder.phase(TOOLKIT.get(name, name)):
                return function(*args, **kwargs)

        return staticmethod(call)

    return make


def _counted(recorder: Recorder) -> Callable[[Callable[..., Any]], Any]:
    """Report the progress of a loop that shows it."""

    def make(with_progress: Callable[..., Any]) -> Callable[..., Any]:
        def iterate(values: Any, title: str, **options: Any) -> Iterator[Any]:
            first = options.get("initial", 0)
            count = first + len(values)
            for done, value in enumerate(with_progress(values, title, **options), start=first):
                recorder.progress(done, count)
                yield value
            recorder.progress(count, count)

        return iterate

    return make


def _found(recorder: Recorder) -> Callable[[Callable[..., Any]], Any]:
    """Note that a run goes on from what an equal one has kept."""

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            if found is not None:
                recorder.note(resumed=True)
            return found

        return call

    return make


def _layers(recorder: Recorder) -> Callable[[Callable[..., Any]], Any]:
    """Report the layers that a modifier of the toolkit has finished."""

    def make(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(modifier: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(modifier, state, *args, **kwargs)
            recorder.progress_by_one(state.model.config.num_hidden_layers)
            return result

        return call

    return make
