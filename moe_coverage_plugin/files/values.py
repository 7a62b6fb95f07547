"""Checks the values of scales and of small tensors, by their bits, so that no dtype needs a library."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_coverage_plugin.files.expert_tensors import layer_number, layers_by_number
from moe_coverage_plugin.files.headers import StoredTensor, Tensors
from moe_coverage_plugin.files.storage import INTEGERS, SHAPE, Modules
from moe_coverage_plugin.manifest import CoverageError, Manifest

# names that compressed-tensors and engines give to scales; a family's own factors can be negative
SCALES = tuple(
    f".{name}_scale" for name in ("weight", "weight_global", "input", "input_global", "output", "k", "v", "q")
)
# the bits of infinity; NaNs of the same sign are above it, negative numbers above both
INFINITY = {"F64": 0x7FF0000000000000, "F32": 0x7F800000, "BF16": 0x7F80, "F16": 0x7C00}
MOST_ELEMENTS = 2**22
"""Tensors outside the experts with at most so many elements are read: norms, biases and routers are far smaller."""


class Values:
    """Bits of tensors, from files that are mapped into memory once."""

    def __init__(self) -> None:
        self._maps: dict[Path, np.ndarray] = {}

    def bits(self, tensor: StoredTensor) -> np.ndarray:
        """Return the elements of a tensor as unsigned integers of the same size, flat."""
        if tensor.file not in self._maps:
            self._maps[tensor.file] = np.memmap(tensor.file, np.uint8, "r")
        content = self._maps[tensor.file][tensor.offset : tensor.offset + tensor.bytes]
        dtype = np.dtype(f"<u{tensor.item_bits // 8}")
        # a forged file may have tensors at odd addresses, which cannot be viewed
        aligned = tensor.offset % dtype.itemsize == 0
        return np.asarray(content).view(dtype) if aligned else np.frombuffer(content.tobytes(), dtype)


def read_shapes(modules: Modules, values: Values) -> dict[str, tuple[int, ...]]:
    """Return the values of all ``weight_shape`` tensors, by module; those of other dtypes are left out."""
    return {
        module: tuple(map(int, values.bits(parts[SHAPE])))
        for module, parts in modules.items()
        if SHAPE in parts and parts[SHAPE].dtype in INTEGERS and parts[SHAPE].elements <= 2
    }


def has_negative_scales(tensors: Tensors) -> bool:
    """Return whether a scale is negative; AutoRound makes such scales, other quantizers do not."""
    values = Values()
    return any(
        int(bits.max()) >> (tensor.item_bits - 1)
        for name, tensor in tensors.items()
        if name.endswith(SCALES) and tensor.dtype in INFINITY and (bits := values.bits(tensor)).size
    )


def check_values(tensors: Tensors, in_experts: set[str], manifest: Manifest, negative: bool, values: Values) -> None:
    """Check that all scales are positive and finite, and small tensors outside the experts finite.

    Reads every scale, which are 1/32 of the bytes of 4-bit weights in groups of 128. Correction biases are minus
    infinity for removed experts.

    Args:
        tensors: of the checkpoint.
        in_experts: names of those that are of experts.
        manifest: of the checkpoint.
        negative: scales may be negative.
        values: reads the files.

    Raises:
        CoverageError: a value is NaN or infinite, or a scale is zero or negative.
    """
    layers: dict[int | None, str] = {**layers_by_number(manifest)}
    for name, tensor in tensors.items():
        if tensor.dtype not in INFINITY or tensor.elements == 0:
            continue
        if name.endswith(SCALES):
            bits = values.bits(tensor)
            if negative:
                bits = _magnitude(bits)
            # NaN, infinity and negative numbers are all above the largest finite number
            if int(bits.max()) >= INFINITY[tensor.dtype] or int(bits.min()) == 0:
                raise CoverageError(
                    f"{name} holds {_worst(bits, tensor.dtype)} as a scale, expected positive numbers: the file is "
                    "damaged, copy the checkpoint again, or quantize the model again"
                )
        elif name not in in_experts and tensor.elements <= MOST_ELEMENTS:
            bits = values.bits(tensor)
            magnitude = _magnitude(bits)
            if int(magnitude.max()) >= INFINITY[tensor.dtype]:
                widths = manifest.widths.get(layers.get(layer_number(name), ""), [])
                if len(widths) == tensor.elements:
                    magnitude = magnitude[np.asarray(widths) > 0]
                if int(magnitude.max()) < INFINITY[tensor.dtype]:
                    continue
                raise CoverageError(
                    f"{name} holds {_worst(magnitude, tensor.dtype)}, expected finite numbers: the file is damaged, "
                    "or the model was before it was compressed; copy the checkpoint again"
                )


def _magnitude(bits: np.ndarray) -> np.ndarray:
    return bits & bits.dtype.type((1 << (bits.dtype.itemsize * 8 - 1)) - 1)


def _worst(bits: np.ndarray, dtype: str) -> str:
    """Describe the first kind of wrong value that is found."""
    infinity, magnitude = INFINITY[dtype], _magnitude(bits)
    if bool((magnitude > infinity).any()):
        return "NaN"
    if bool((magnitude == infinity).any()):
        return "infinity"
    return "zero" if bool((magnitude == 0).any()) else "a negative number"
