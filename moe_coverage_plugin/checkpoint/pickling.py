"""Lets ``pickle`` and ``torch.save`` take pruned models, whose toolkits put functions made at run time into them.

Only what is pickled is changed: the model itself stays as it is, and copies of it are made as before.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.offload import disable_onloading, get_offloaded_device
from compressed_tensors.offload.module import remove_module_offload
from compressed_tensors.offload.utils import as_single_threaded
from compressed_tensors.quantization.lifecycle.forward import set_forward_quantized
from compressed_tensors.quantization.utils import is_module_quantized
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from moe_coverage_plugin.checkpoint.binding import RECORD, Save, bind
from moe_coverage_plugin.checkpoint.calibrated_scales import watch_quantizers
from moe_coverage_plugin.checkpoint.recipe_values import recipe_of_run
from moe_coverage_plugin.manifest import CoverageError

# the handle of the toolkit's hook that decompresses a model in its first forward pass
DECOMPRESS_HOOK = "ct_decompress_hook"


def make_picklable(model: PreTrainedModel, save: Save) -> None:
    """Make ``pickle`` take a pruned model, and copies of it.

    Args:
        model: with a record of its pruning.
        save: what ``save_pretrained`` calls with such models, also after they were pickled.
    """
    # patch: pickled-models
    copyreg.pickle(type(model), partial(_reduce_model, save))  # pyright: ignore[reportArgumentType]
    for module in model.modules():
        if isinstance(module, LinearExperts2D) and _source_class(type(module)) is not None:
            copyreg.pickle(type(module), _reduce_experts)  # pyright: ignore[reportArgumentType]


def _reduce_model(save: Save, model: PreTrainedModel) -> tuple[Any, ...]:
    if RECORD not in vars(model):
        return tuple(object.__reduce_ex__(model, 2))
    return _new_model, (type(model), save), _State(model)


def _new_model(model_class: type[PreTrainedModel], save: Save) -> PreTrainedModel:
    bind(model_class, save)
    watch_quantizers()
    copyreg.pickle(model_class, partial(_reduce_model, save))  # pyright: ignore[reportArgumentType]
    return model_class.__new__(model_class)


def _reduce_experts(experts: LinearExperts2D) -> tuple[Any, ...]:
    return _new_experts, (_source_class(type(experts)),), vars(experts)


def _new_experts(source_class: type[Module]) -> LinearExperts2D:
    """Return experts without attributes, of the class that the toolkit makes for a class of transformers."""
    made: Any = LinearExperts2D.get_linear_experts_cls(source_class)  # pyright: ignore[reportArgumentType]
    copyreg.pickle(made, _reduce_experts)
    # experts have this method as an attribute, which pickle looks up by the name of its function
    setattr(made, made._apply_gate.__name__, made._apply_gate)
    return made.__new__(made)


def _source_class(made: type) -> type[Module] | None:
    """Return the class of transformers for which the toolkit made a class at run time; ``None`` for other classes."""
    if getattr(sys.modules.get(made.__module__), made.__qualname__, None) is made:
        return None  # pickle finds it
    return next((source for source, each in LinearExperts2D._registry.items() if each is made), None)


class _State(dict[str, Any]):
    """The attributes of a model, which are changed when they are pickled."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(vars(model))
        self._model = model

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(dict(self), memo)

    def __reduce__(self) -> tuple[Any, ...]:
        """Describe the attributes without functions made at run time; tensors are those of the model."""
        model = self._model
        if any(get_offloaded_device(module) == "disk" for module in model.modules()):
            raise CoverageError(
                "the model's weights are on disk, in files that a pickle would not have: use save_pretrained"
            )
        with disable_onloading():
            memo: dict[int, Any] = {id(tensor): tensor for tensor in _tensors(model)}
        # parts that refer to the model refer to the one that is being pickled
        memo[id(model)] = model
        copied = type(model).__new__(type(model))
        vars(copied).update(deepcopy(dict(self), memo))
        copied_record: Any = vars(copied)[RECORD]
        copied_record.recipe = recipe_of_run(model) or copied_record.recipe
        quantized = [module for module in copied.modules() if _remove_made_forward(module)]
        if (handle := vars(copied).get(DECOMPRESS_HOOK)) is not None:
            copied._forward_pre_hooks[handle.id] = decompress
        return _restored, (vars(copied), quantized)


def _tensors(model: Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _remove_made_forward(module: Module) -> bool:
    """Remove the toolkit's ``forward`` of an offloaded or quantized module, and return whether it quantized."""
    remove_module_offload(module)
    forward = vars(module).get("forward")
    quantizes = is_module_quantized(module) and hasattr(forward, "__wrapped__")
    if quantizes or getattr(forward, "__func__", None) is type(module).forward:
        del vars(module)["forward"]
    return quantizes


def _restored(attributes: dict[str, Any], quantized: list[Module]) -> dict[str, Any]:
    for module in quantized:
        set_forward_quantized(module)  # pyright: ignore[reportArgumentType]
    return attributes


@contextmanager
def one_decompress_hook(model: Module) -> Iterator[None]:
    """Remove the hook of an earlier save when the toolkit saves a model again.

    The toolkit adds one hook for each save and removes the last, so that the others decompress a second time.
    """
    earlier = vars(model).get(DECOMPRESS_HOOK)
    try:
        yield
    finally:
        # patch: hook-of-each-save
        if earlier is not None and vars(model).get(DECOMPRESS_HOOK) is not earlier:
            earlier.remove()


def decompress(model: Module, _args: Any) -> None:
    """Hook before the first forward pass of a model that was pickled after it was saved, with compressed weights."""
    with as_single_threaded():
        ModelCompressor().decompress_model(model)
