"""Linear layers that get the same inputs, such as q, k and v, have one Hessian matrix, which GPTQ factorizes once.

GPTQ quantizes each row of a weight by itself, in an order of columns that depends on the Hessian matrix alone. Weights
with the same inputs are therefore quantized as one weight, one below the other, and each row becomes what it would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.offload import update_offload_parameter
from compressed_tensors.quantization import QuantizationScheme, QuantizationStrategy
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.observers import Observer
from torch import Tensor
from torch.nn import Linear, Module, Parameter

from moe_coverage_plugin.core.products import wide_product

# parameters that quantization changes
QUANTIZED = ("weight", "weight_scale", "weight_zero_point")
# each row has scales of its own
BY_ROWS = (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)


def hessian(x_MA: Tensor) -> Tensor:
    """``sum_t x_t x_t^T`` over the inputs of a linear layer, ``[A, A]`` in float32 or wider."""
    return wide_product(x_MA.T, x_MA)


@dataclass
class _Sum:
    total_AA: Tensor
    # numbers of the products that are added
    parts: list[int] = field(default_factory=list)


class InputSums:
    """Hessian matrices of linear layers over all batches, with one product for calls that share their input."""

    def __init__(self) -> None:
        """Create sums of nothing."""
        self._sums: dict[Module, _Sum] = {}
        self._products = 0
        self._last: tuple[Tensor, int, Tensor] | None = None

    def add(self, module: Module, x: Tensor, real_T: Tensor | None) -> None:
        """Add the input of a call.

        Args:
            module: that was called.
            x: its input, with inputs in the last dimension.
            real_T: bool, tokens that are not padding; ``None``: all.
        """
        version = 0 if x.is_inference() else x._version
        # not the same values after a change in place
        if self._last is None or self._last[0] is not x or self._last[1] != version:
            x_MA = x.detach().reshape(-1, x.shape[-1])
            # a layer that sees something else than one row for each token keeps its padding
            if real_T is not None and len(real_T) == len(x_MA):
                # zeros add nothing, and unlike a selection they do not wait for the device
                x_MA = x_MA.masked_fill(~real_T.to(x_MA.device)[:, None], 0)
            self._last = x, version, hessian(x_MA)
            self._products += 1
        added_AA = self._last[2]
        if (found := self._sums.get(module)) is None:
            self._sums[module] = _Sum(added_AA, [self._products])
        else:
            found.total_AA = found.total_AA + added_AA
            found.parts.append(self._products)

    def forget_last(self) -> None:
        """Let the memory of the last input be used again."""
        self._last = None

    def pop(self, modules: Sequence[Linear]) -> dict[Module, Tensor]:
        """Return and remove the matrices of modules: one tensor for those with the same inputs, zeros without any."""
        shared: dict[tuple[int, ...], Tensor] = {}
        found: dict[Module, Tensor] = {}
        for module in modules:
            total = self._sums.pop(module, None)
            if total is None:
                found[module] = hessian(module.weight.detach()[:0])
            else:
                found[module] = shared.setdefault(tuple(total.parts), total.total_AA)
        return found


class _Observers:
    """Stands for the observer of stacked weights."""

    def __init__(self, linears: Sequence[Linear]):
        self._linears: Sequence[Any] = linears

    @property
    def of_rows(self) -> list[Any]:
        """The layers' own observers, whose scales are below each other."""
        return [each.weight_observer for each in self._linears]

    def get_qparams(self) -> dict[str, Tensor | None]:
        """Return the scales and zero points of all rows, which the layers' own observers find."""
        parts = [each.get_qparams() for each in self.of_rows]
        return {
            name: None if value is None else torch.cat([part[name] for part in parts])
            for name, value in parts[0].items()
        }


def found_qparams(modules: Sequence[Any]) -> list[dict[str, Tensor | None]]:
    """Scales and zero points of modules of one shape and scheme, whose observers have seen their weights.

    If they depend on the extreme values of each row alone, they are computed for all modules together: for one module
    the toolkit takes some 40 small operations.
    """
    arguments = _scheme(modules[0]).weights
    observers: list[list[Any]] = [getattr(each.weight_observer, "of_rows", [each.weight_observer]) for each in modules]
    own = (type(each).get_qparams is not Observer.get_qparams for rows in observers for each in rows)
    if arguments is None or arguments.strategy not in BY_ROWS or any(own):
        return [module.weight_observer.get_qparams() for module in modules]
    least, most = [], []
    for rows in observers:
        found = [each.get_statistics() for each in rows]
        least.append(torch.cat([each["min_vals"] for each in found]))
        most.append(torch.cat([each["max_vals"] for each in found]))
        for each in rows:
            each.delete_statistics()
    scales, zero_points = calculate_qparams(torch.stack(least), torch.stack(most), arguments)
    return [
        {"scale": scale, "zero_point": zero_point, "global_scale": None}
        for scale, zero_point in zip(scales, zero_points, strict=True)
    ]


class StackedLinear(Linear):
    """The weights of linear layers with the same inputs, one below the other, while they are quantized.

    Attributes:
        linears: the layers.
        weight_observer: has their scales.
    """

    def __init__(self, linears: Sequence[Linear]):
        """Copy the weights."""
        super().__init__(linears[0].in_features, sum(each.out_features for each in linears), False, device="meta")
        self.quantization_scheme = _scheme(linears[0])
        for name in QUANTIZED:
            if hasattr(linears[0], name):
                rows = torch.cat([getattr(each, name).detach() for each in linears])
                setattr(self, name, Parameter(rows, requires_grad=False))
        # a plain list and object, so that they are not modules of this one
        self.linears = list(linears)
        self.weight_observer = _Observers(self.linears)

    def write_back(self) -> None:
        """Give the layers what their rows have become."""
        for name in QUANTIZED:
            if not hasattr(self, name):
                continue
            rows = getattr(self, name).detach().split([each.out_features for each in self.linears])
            for linear, value in zip(self.linears, rows, strict=True):
                update_offload_parameter(linear, name, value)


def stacked(hessians: Mapping[Module, Tensor]) -> list[StackedLinear]:
    """Stack the modules that have the same Hessian matrix, as an object, and the same scheme, if it is by rows."""
    groups: dict[tuple[int, str], list[Linear]] = {}
    for module, hessian_AA in hessians.items():
        weights = _scheme(module).weights
        if isinstance(module, Linear) and weights is not None and weights.strategy in BY_ROWS:
            groups.setdefault((id(hessian_AA), weights.model_dump_json()), []).append(module)
    return [StackedLinear(linears) for linears in groups.values() if len(linears) > 1]


def _scheme(module: Module) -> QuantizationScheme:
    scheme = module.quantization_scheme
    assert isinstance(scheme, QuantizationScheme)
    return scheme
