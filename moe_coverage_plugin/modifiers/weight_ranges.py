"""The ranges of ``imatrix_mse``, which lose least at the inputs of a layer, for many layers at once.

The toolkit's observer tries smaller and smaller ranges for the weights of a quantization group. It takes the one whose
rounded weights have the least error, each weighted by the mean square of its input. It searches in one layer after the
other, some hundred small operations each. Here layers of one shape are searched together, and the mean squares are the
diagonal of the Hessian matrix, which GPTQ needs anyway. Errors are squared, as GPTQ counts them, unless
``observer_kwargs`` of the scheme have another ``norm``. The search does not stop early (the observer's ``patience``),
because that would wait for the device at each step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.observers import IMatrixMSEObserver
from llmcompressor.observers.helpers import flatten_for_calibration
from torch import Tensor
from torch.nn import Module

# weights that are searched together at most: a step takes about 20 bytes for each
TOGETHER = 2**26
# the power of errors, unless the scheme names another: GPTQ keeps the sum of squares small
NORM = 2.0


def weighs_inputs(module: Module) -> bool:
    """Whether the ranges of a layer's weights are to be found by the mean squares of its inputs."""
    return isinstance(getattr(module, "weight_observer", None), IMatrixMSEObserver)


@torch.no_grad()
def observe_weighted(squares: Mapping[Module, Tensor]) -> None:
    """Give the observers of layers the ranges of their weights.

    Args:
        squares: sums or means of the squares of inputs, ``[A]``, of linear layers that :func:`weighs_inputs`.
    """
    for layers in _of_one_kind(list(squares)):
        observer: Any = layers[0].weight_observer
        # read once, because each read of an offloaded weight copies it
        weights = [each.weight.detach() for each in layers]
        parts = [_relative(squares[each]).expand_as(weight) for each, weight in zip(layers, weights, strict=True)]
        rows, importance = (
            torch.cat([flatten_for_calibration(each, "weight", observer.args) for each in tensors], dim=1)
            for tensors in (weights, parts)
        )
        least, most = least_error_ranges(rows, importance, observer)
        sizes = [each.out_features for each in layers]
        for layer, low, high in zip(layers, least.split(sizes), most.split(sizes), strict=True):
            found: Any = layer.weight_observer
            found.min_vals, found.max_vals = low, high


def least_error_ranges(weights: Tensor, importance: Tensor, observer: IMatrixMSEObserver) -> tuple[Tensor, Tensor]:
    """The least and largest value that each group of weights can represent, with the least weighted error.

    Args:
        weights: as the toolkit's ``flatten_for_calibration`` returns them, numbers of a group in the last dimension.
        importance: by which the error of each weight is multiplied, of the same shape.
        observer: its ``grid`` is the number of steps from the entire range to none, of which the part ``maxshrink`` is
            tried, from ``expand`` times the range on.

    Returns:
        Two tensors of the shape of scales.
    """
    norm = observer.args.observer_kwargs.get("norm", NORM)
    # a scale for each row of a group, as for each token
    by_group = observer.args.model_copy(update={"strategy": QuantizationStrategy.TOKEN})
    least, most = weights.amin((0, -1)) * observer.expand, weights.amax((0, -1)) * observer.expand
    found_least, found_most = least, most
    smallest = torch.full_like(least, torch.inf, dtype=torch.float32)
    for step in range(max(1, int(observer.maxshrink * observer.grid)) + 1):
        part = 1 - step / observer.grid
        scale, zero_point = calculate_qparams(part * least, part * most, observer.args)
        rounded = fake_quantize(weights, scale[..., None], zero_point[..., None], by_group)
        error = ((rounded.float() - weights).abs_().pow_(norm) * importance).sum((0, -1))
        found_least = torch.where(error < smallest, part * least, found_least)
        found_most = torch.where(error < smallest, part * most, found_most)
        smallest = torch.minimum(error, smallest)
    return found_least, found_most


def _of_one_kind(layers: Sequence[Any]) -> Iterator[list[Any]]:
    """Linear layers of one shape and scheme, as many as are searched together."""
    kinds: dict[tuple[int, int, str], list[Any]] = defaultdict(list)
    for layer in layers:
        kinds[layer.out_features, layer.in_features, str(layer.weight_observer.args)].append(layer)
    for (out_features, in_features, _), alike in kinds.items():
        count = max(1, TOGETHER // (out_features * in_features))
        yield from (alike[first : first + count] for first in range(0, len(alike), count))


def _relative(squares_A: Tensor) -> Tensor:
    """Relative to their mean, as the toolkit has them."""
    squares_A = squares_A.float()
    return squares_A / (squares_A.mean() + torch.finfo(torch.float32).tiny)
