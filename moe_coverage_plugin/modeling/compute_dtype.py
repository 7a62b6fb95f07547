"""Lets a bfloat16 model compute calibration passes in float32, on processors that are slow in bfloat16.

Without bfloat16 instructions, torch multiplies bfloat16 matrices many times slower than float32 ones. A float32 copy
of the entire model would take twice its memory, so weights are converted for the time in which they are used: those
of one decoder layer without its experts while it computes, and those of one expert at a time. The conversion is exact.
The model's own parameters are never written: they keep their dtype, their bits and their place, offloaded or not. The
results are those of the same model opened in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from compressed_tensors.offload import disable_onloading, get_execution_device
from loguru import logger
from torch import Tensor
from torch.nn import Embedding, Module, ModuleList, Parameter

from moe_coverage_plugin.modeling.memory import free_host_memory

# names, in torch.cpu.get_capabilities(), of instruction sets that multiply bfloat16: first x86, then Arm
BFLOAT16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16", "avx10_2", "bf16", "sve_bf16")

# models that compute in float32 now, so that a context inside another one changes nothing
_CONVERTED: WeakSet[Module] = WeakSet()


class ComputeDtype(NamedTuple):
    """The dtype in which a model computes, and the reason for it in words."""

    dtype: torch.dtype
    reason: str


def choose_compute_dtype(model: Module, capabilities: Mapping[str, Any] | None = None) -> ComputeDtype:
    """Choose the dtype of calibration passes by the model's dtype and device and the features of the processor.

    Args:
        model: may be offloaded; the device on which it computes counts.
        capabilities: of the processor; ``None``: those that torch reports of this one.

    Returns:
        float32 for a model in bfloat16 on a processor without bfloat16 instructions, otherwise the model's dtype.
    """
    with disable_onloading():
        parameters = [each for each in model.parameters() if each.is_floating_point()]
    if all(each.dtype != torch.bfloat16 for each in parameters):
        return ComputeDtype(parameters[0].dtype, "it is the model's dtype")
    devices = {str(get_execution_device(module)) for module in model.modules() if module._parameters}
    if devices != {"cpu"}:
        return ComputeDtype(torch.bfloat16, f"the model computes on {', '.join(sorted(devices))}")
    if capabilities is None:
        capabilities = torch.cpu.get_capabilities()
    known = [name for name in BFLOAT16_INSTRUCTIONS if name in capabilities]
    processor = f"{capabilities.get('cpu_name', 'the processor')} ({capabilities.get('architecture')})"
    if not known:
        return ComputeDtype(torch.bfloat16, f"torch does not report whether {processor} multiplies bfloat16")
    if present := [name for name in known if capabilities[name]]:
        return ComputeDtype(torch.bfloat16, f"{processor} multiplies bfloat16 by {' and '.join(present)}")
    return ComputeDtype(
        torch.float32, f"{processor} has no instructions that multiply bfloat16 ({', '.join(known)}) and is slow in it"
    )


@contextmanager
def fast_compute_dtype(model: Module, *, for_many_calls: bool = False) -> Iterator[ComputeDtype]:
    """Let ``model`` compute in the dtype of :func:`choose_compute_dtype`, and log it if that is not its own.

    Inside, forward passes return float32 where they returned bfloat16. A parameter that is read or written between
    them is the model's own; what a forward pass itself writes into a bfloat16 parameter or buffer is discarded.

    Args:
        model: called as ``module(...)``, as a whole or decoder layer by decoder layer.
        for_many_calls: keep converted weights until the end if they take at most half of the free memory. In a model
            that generates, one token at a time, converting for each call takes longer than computing.

    Yields:
        The dtype and the reason for it.
    """
    chosen = choose_compute_dtype(model)
    converts = chosen.dtype == torch.float32 and model not in _CONVERTED and _has_bfloat16(model)
    units = list(_units(model)) if converts else []
    if not units:
        yield chosen
        return
    logger.info(
        f"Calibration computes in float32, because {chosen.reason}; the weights stay, and are saved, in bfloat16"
    )
    keeps = for_many_calls and _float32_bytes(model) <= free_host_memory() // 2
    with ExitStack() as stack:
        _CONVERTED.add(model)
        stack.callback(_CONVERTED.discard, model)
        for module in units:
            if type(module).forward is Embedding.forward:
                # a lookup is exact in any dtype: convert the rows that were read, not the table
                stack.callback(module.register_forward_hook(_float32_output).remove)
                continue
            weights = _Float32Weights(module)
            # what always_call does not see is an interrupt
            stack.callback(weights.restore)
            if keeps:
                weights.convert()
                continue
            stack.callback(module.register_forward_pre_hook(weights.on_enter).remove)
            stack.callback(module.register_forward_hook(weights.on_leave, always_call=True).remove)
        yield chosen


def without_hooks(layer: Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of a decoder layer for callers that bypass its hooks, as a recomputation in ``backward`` does.

    It computes in float32 if calls of the layer do, that is, inside :func:`fast_compute_dtype`.
    """
    hooks = (getattr(hook, "__self__", None) for hook in layer._forward_pre_hooks.values())
    if not any(isinstance(each, _Float32Weights) for each in hooks):
        return forward

    def converted(*args: Any, **kwargs: Any) -> Any:
        weights = _Float32Weights(layer)
        weights.convert()
        try:
            return forward(*args, **kwargs)
        finally:
            weights.restore()

    return converted


class _Float32Weights:
    """Gives a unit (see :func:`_units`) float32 parameters and buffers for the time of a call."""

    def __init__(self, unit: Module):
        """Change nothing yet."""
        self._unit = unit
        # module, attribute, the module's own table
        self._replaced: list[tuple[Module, str, Any]] = []

    def on_enter(self, module: Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Forward pre-hook."""
        if _is_traced():
            return None
        if _is_disabled_head(module):
            return tuple(arg.bfloat16() if isinstance(arg, Tensor) else arg for arg in args)
        self.convert()
        return None

    def on_leave(self, _module: Module, _args: tuple[Any, ...], _output: Any) -> None:
        """Forward hook."""
        self.restore()

    def convert(self) -> None:
        """Replace the tables of parameters and buffers; the tensors in the module's own tables are not touched."""
        for module in _bfloat16_modules(self._unit):
            for attribute in ("_parameters", "_buffers"):
                own = getattr(module, attribute)
                setattr(module, attribute, {name: _float32(tensor) for name, tensor in own.items()})
                self._replaced.append((module, attribute, own))

    def restore(self) -> None:
        """Put the module's own tables back."""
        while self._replaced:
            module, attribute, own = self._replaced.pop()
            setattr(module, attribute, own)


def _is_traced() -> bool:
    """Whether the toolkit traces the model: weights may then have no values, and hooks do not run after an error."""
    return torch.compiler.is_compiling()


def _is_disabled_head(module: Module) -> bool:
    """Whether the toolkit has replaced the output head, which then multiplies by a bfloat16 weight without values."""
    return getattr(module.forward, "__qualname__", "").startswith("disable_lm_head.")


def _units(model: Module) -> Iterator[Module]:
    """The modules whose calls convert weights.

    They are the elements of lists, such as decoder layers and their experts, and outside of lists all modules without
    a list, such as embedding, last norm and head.
    """
    elements = [element for each in model.modules() if isinstance(each, ModuleList) for element in each]
    inside_lists = {module for element in elements for module in element.modules()}
    outside = [
        module
        for module in model.modules()
        if module not in inside_lists and not any(isinstance(each, ModuleList) for each in module.modules())
    ]
    yield from (unit for unit in (*elements, *outside) if _bfloat16_modules(unit))


def _has_bfloat16(model: Module) -> bool:
    with disable_onloading():
        return any(each.dtype == torch.bfloat16 for each in chain(model.parameters(), model.buffers()))


def _float32_bytes(model: Module) -> int:
    """Bytes of float32 copies of all bfloat16 parameters and buffers."""
    with disable_onloading():
        tensors = chain(model.parameters(), model.buffers())
        return sum(4 * each.numel() for each in tensors if each.dtype == torch.bfloat16)


def _bfloat16_modules(unit: Module) -> list[Module]:
    """The modules of a unit, without those in its lists, that themselves hold a bfloat16 parameter or buffer."""
    found: list[Module] = []
    with disable_onloading():
        remaining = [unit]
        while remaining:
            module = remaining.pop()
            remaining += [] if isinstance(module, ModuleList) else module.children()
            tensors = [tensor for table in (module._parameters, module._buffers) for tensor in table.values()]
            if any(tensor is not None and tensor.dtype == torch.bfloat16 for tensor in tensors):
                found.append(module)
    return found


def _float32(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.dtype != torch.bfloat16:
        return tensor
    converted = tensor.detach().float()
    return Parameter(converted, requires_grad=tensor.requires_grad) if isinstance(tensor, Parameter) else converted


def _float32_output(_module: Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output if _is_traced() else output.float()
