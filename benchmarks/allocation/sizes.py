"""Computes the bytes of the checkpoint of a model in memory."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch.nn import Linear, Module
from transformers import PreTrainedModel

from moe_coverage_plugin.modeling.moe_layers import find_moe_layers, projections

BYTES_PER_NUMBER = 2
"""Checkpoints are stored in bfloat16, whatever dtype was used to compute."""

WORD_BYTES = 4

SHAPE_BYTES = 16
"""The unpacked shape of a packed weight, two int64."""


def checkpoint_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of all tensors of the checkpoint, without headers.

    Quantized layers are counted as packed integers with 16-bit scales, other tensors with 2 bytes per number. Tensors
    that several modules share are counted once.
    """
    quantized = _quantized_linears(model)
    numel: dict[int, int] = {}
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner not in quantized or leaf == "bias":
            numel[tensor.data_ptr()] = tensor.numel()
    return BYTES_PER_NUMBER * sum(numel.values()) + sum(_packed_bytes(*found) for found in quantized.values())


def ideal_sparse_bytes(model: PreTrainedModel) -> int:
    """Return the bytes if expert weights of zero were not stored, and a mask had one bit per expert weight."""
    scheme_of = dict(_quantized_linears(model).values())
    saved_bits = 0
    for layer in find_moe_layers(model):
        for mlp in layer.mlps:
            for linear in projections(mlp).values():
                bits = scheme_of[linear].num_bits if linear in scheme_of else 8 * BYTES_PER_NUMBER
                saved_bits += int((linear.weight == 0).sum()) * bits - linear.weight.numel()
    return checkpoint_bytes(model) - saved_bits // 8


def _packed_bytes(linear: Linear, args: QuantizationArgs) -> int:
    assert args.symmetric, "zero points are not counted"
    rows, columns = linear.weight.shape
    words = -(-columns * args.num_bits // (8 * WORD_BYTES))
    groups = columns // args.group_size if args.strategy == QuantizationStrategy.GROUP and args.group_size else 1
    return rows * (words * WORD_BYTES + groups * BYTES_PER_NUMBER) + SHAPE_BYTES


def _quantized_linears(model: Module) -> dict[str, tuple[Linear, QuantizationArgs]]:
    found: dict[str, tuple[Linear, QuantizationArgs]] = {}
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if isinstance(module, Linear) and scheme is not None and scheme.weights is not None:
            found[name] = (module, scheme.weights)
    return found
