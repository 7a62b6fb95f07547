"""Lets all passes of a run over a bfloat16 model compute in float32, on processors that are slow in bfloat16."""

from __future__ import annotations

from contextlib import ExitStack

from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning.wanda import WandaPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from transformers import PreTrainedModel

from moe_coverage_plugin.modeling.compute_dtype import fast_compute_dtype
from moe_coverage_plugin.modifiers.oneshot_run import is_ours, recipe_around

# only hooks on modules, which may see float32 activations; others, like AutoRound, call and train parts of a layer
HOOKING = (QuantizationModifier, GPTQModifier, SmoothQuantModifier, WandaPruningModifier)


def choose_dtype_of_passes(modifier: Modifier, model: PreTrainedModel) -> ExitStack:
    """Let the passes of the recipe compute in the dtype of :func:`fast_compute_dtype` until the stack is closed.

    If the recipe has modifiers that are not known to work with it, only our own passes do, each for itself.

    Args:
        modifier: of the recipe, which must be initializing.
        model: the model of the run.
    """
    stack = ExitStack()
    before, after = recipe_around(modifier)
    if all(is_ours(other) or type(other) in HOOKING for other in (*before, *after)):
        stack.enter_context(fast_compute_dtype(model))
    return stack
