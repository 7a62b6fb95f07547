"""Keeps what a pass changes in each decoder layer, so that a run that is killed goes on at a later layer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from compressed_tensors.offload import update_offload_parameter
from loguru import logger
from torch import Tensor
from torch.nn import Module

from moe_coverage_plugin.calibration.calibration_set import batches_hash
from moe_coverage_plugin.files.progress import Progress
from moe_coverage_plugin.modeling.memory import return_pinned_memory

# first part of the names in the progress of a run
KEPT_LAYERS = "layers"


class KeptLayers:
    """The tensors that a pass has changed, by decoder layer in the order of the pass."""

    def __init__(
        self, progress: Progress | None, title: str, batches: Sequence[Mapping[str, Any]], plan: Iterable[bytes]
    ):
        """Find what an equal pass has kept.

        Args:
            progress: of the run; ``None``: nothing is kept.
            title: of the pass, for messages.
            batches: that the pass takes through the layers.
            plan: everything else that decides what it makes of them.
        """
        self._progress = progress
        self._index = -1
        self._goes_on = progress is not None
        if progress is None:
            return
        digest = hashlib.sha256(batches_hash(batches).encode())
        for each in plan:
            digest.update(each)
        self._prefix = f"{KEPT_LAYERS}.{digest.hexdigest()[:16]}"
        finished = 0
        while progress.kept(self._name(finished)) is not None:
            finished += 1
        if finished:
            logger.info(f"{title}: going on from layer {finished + 1}, after {finished} that are finished")

    def load(self) -> dict[str, Tensor] | None:
        """Return what was kept of the next layer; ``None`` if it or a layer before it must be computed."""
        self._index += 1
        if self._progress is None or not self._goes_on:
            return None
        found = self._progress.load(self._name(self._index))
        self._goes_on = found is not None
        return found

    def save(self, decoder_layer: Module, changed: Iterable[Module], others: Mapping[str, Tensor]) -> None:
        """Keep the parameters of modules, and other tensors, of the layer that :meth:`load` was called for last.

        They are written while the next layer is computed.

        Raises:
            CoverageError: this layer or the one before it cannot be written.
        """
        if self._progress is None:
            return
        names = {module: name for name, module in decoder_layer.named_modules()}
        tensors: dict[str, Tensor] = {
            f"{names[module]}.{name}": parameter
            for module in dict.fromkeys(changed)
            for name, parameter in module.named_parameters(recurse=False)
        }
        self._progress.save_in_background(self._name(self._index), {**tensors, **others})

    def finish(self) -> None:
        """Wait until the last layer is written.

        Raises:
            CoverageError: it could not be written.
        """
        if self._progress is not None:
            self._progress.finish()
            # copies from a card were in it
            return_pinned_memory()

    def _name(self, index: int) -> str:
        return f"{self._prefix}.{index}"


def restore(decoder_layer: Module, kept: Mapping[str, Tensor]) -> None:
    """Write kept parameters into a decoder layer, whose modules have their shapes already."""
    for path, tensor in kept.items():
        module, _, name = path.rpartition(".")
        update_offload_parameter(decoder_layer.get_submodule(module), name, tensor)
