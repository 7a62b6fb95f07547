"""Loads the offloaded weights of one decoder layer at a time, once for all batches of a pass.

llm-compressor copies an offloaded weight to its device whenever it is read, so each batch would load every layer. It
keeps copies in a table of its own, ``OffloadCache.keep_onloaded_values``, while its context ``disable_offloading`` is
active; writes update both the copy and the original. Here the table has one layer at a time, and a thread loads the
next one meanwhile, on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from typing import Any, NamedTuple

import torch
from compressed_tensors.offload import OffloadCache, disable_offloading
from compressed_tensors.offload.utils import to_tensor
from loguru import logger
from torch import Tensor
from torch.nn import Module

from moe_coverage_plugin.modeling.memory import free_memory

# of the free memory of a device, the part that loaded layers may take
SHARE = 0.5


class _Offloaded(NamedTuple):
    """A tensor that is not on the device of its module, and the cache that loads it."""

    cache: OffloadCache
    tensor: Tensor


def is_offloaded(modules: Iterable[Module]) -> bool:
    """Whether a weight or buffer of any module is in host memory or on disk, but computes on another device."""
    return any(_offloaded(module) for module in modules)


def offloaded_bytes(module: Module) -> int:
    """Bytes of the offloaded tensors of a module."""
    return sum(each.tensor.nbytes for each in _offloaded(module))


class LoadedLayers:
    """The layers that a pass visits, in this order, each with its weights on its device during its visit.

    A context manager to iterate over once. A visit may change the layer that it visits, and no other. Weights of one
    shape are updated on the device and in their place; the toolkit moves weights of a new shape to their place at
    once, and they are loaded when they are read next.

    Other weights that are read within the context, such as those of the embedding, stay on their device until its end.
    """

    def __init__(self, order: Sequence[Module]):
        """Decide how many layers fit on the device; a layer may be visited again.

        Args:
            order: the layers.
        """
        self._order = list(order)
        sizes = {layer: offloaded_bytes(layer) for layer in dict.fromkeys(self._order)}
        largest = max(sizes, key=lambda layer: sizes[layer])
        needed = sizes[largest]
        self._device = _device(largest) if needed else torch.device("cpu")
        room = SHARE * free_memory(self._device) if needed else 0.0
        # as many as fit: this one, or also the next one
        self._held = int(min(2, room // needed)) if needed else 0
        if needed and self._held < 2:
            slower = "is not loaded ahead" if self._held else "are read again for every batch"
            logger.warning(
                f"The weights of a decoder layer take {needed / 2**30:.1f} GiB and {room / 2**30:.1f} GiB may be used "
                f"for loaded layers, so {'the next layer' if self._held else 'they'} {slower}"
            )
        self._stack = ExitStack()
        self._pool: ThreadPoolExecutor | None = None
        self._loaded: set[Tensor] = set()
        self._ahead: tuple[Module, Future[dict[Tensor, Tensor]]] | None = None

    def __len__(self) -> int:
        """Return the number of visits."""
        return len(self._order)

    def __enter__(self) -> LoadedLayers:
        """Let the toolkit keep what it loads."""
        if self._held:
            self._stack.enter_context(disable_offloading())
            self._pool = self._stack.enter_context(ThreadPoolExecutor(1, "moe-coverage-loading"))
            self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the thread and release all copies."""
        self._ahead = None
        self._release(())
        self._stack.close()

    def __iter__(self) -> Iterator[Module]:
        """Yield each layer with its weights on its device."""
        before: Module | None = None
        for index, layer in enumerate(self._order):
            if self._held and layer is not before:
                if before is not None:
                    self._release(before.modules())
                self._load(layer)
                following = next((each for each in islice(self._order, index + 1, None) if each is not layer), None)
                if following is not None and self._held > 1:
                    assert self._pool is not None
                    tensors = _offloaded(following)
                    self._ahead = following, self._pool.submit(_onload, tensors, self._stream)
            before = layer
            yield layer

    def _load(self, layer: Module) -> None:
        loaded = self._loaded_ahead() if self._ahead is not None and self._ahead[0] is layer else None
        self._ahead = None
        if loaded is None:
            loaded = _onload(_offloaded(layer), None)
        self._loaded = set(loaded)
        # patch: loaded-layers
        OffloadCache.keep_onloaded_values.update(loaded)

    def _loaded_ahead(self) -> dict[Tensor, Tensor] | None:
        """What the thread has loaded; ``None`` if there was too little memory while the layer before was visited."""
        assert self._ahead is not None
        try:
            loaded = self._ahead[1].result()
        except torch.OutOfMemoryError:
            logger.warning("Too little GPU memory is free to load the next layer ahead: layers are loaded in turn")
            self._held = 1
            return None
        for tensor in loaded.values():
            if tensor.is_cuda:
                # it was allocated for the stream of the thread, which must not reuse it before this one is done
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return loaded

    def _release(self, modules: Iterable[Module]) -> None:
        """Release what was loaded of a layer, and what its modules have loaded since."""
        new = {each.tensor for module in modules for each in _offloaded(module, recurse=False)}
        for tensor in self._loaded | new:
            OffloadCache.keep_onloaded_values.pop(tensor, None)
        self._loaded = set()


def _offloaded(module: Module, recurse: bool = True) -> list[_Offloaded]:
    tables: list[Any] = [
        table for each in (module.modules() if recurse else [module]) for table in (each._parameters, each._buffers)
    ]
    return [
        _Offloaded(table, tensor)
        for table in tables
        if isinstance(table, OffloadCache) and _is_elsewhere(table)
        for tensor in table.offloaded_values.values()
        if tensor is not None
    ]


def _is_elsewhere(cache: OffloadCache) -> bool:
    place = cache.offload_device
    return place == "disk" or torch.device(place).type != torch.device(cache.onload_device).type


def _device(layer: Module) -> torch.device:
    return torch.device(_offloaded(layer)[0].cache.onload_device)


@torch.no_grad()
def _onload(tensors: Sequence[_Offloaded], stream: torch.cuda.Stream | None) -> dict[Tensor, Tensor]:
    """Copies on the device by their originals; complete when this returns, because the toolkit's copies are."""
    with torch.cuda.stream(stream):
        return {each.tensor: _copy(each) for each in tensors}


def _copy(offloaded: _Offloaded) -> Tensor:
    loaded = offloaded.cache.onload(offloaded.tensor)
    assert loaded is not None
    if loaded.device.type == "cpu":
        # it is a mapped file, which is read now, and which a write would change under its reader
        return to_tensor(loaded.clone(), offloaded.tensor)
    return loaded
