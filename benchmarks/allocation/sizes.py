"""Bytes that a model in memory would take as a checkpoint."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch.nn import Linear, Module
from transformers import PreTrainedModel

from moe_coverage_plugin.modeling.moe_layers import find_moe_layers, projections

# 16 bit: what checkpoints of this kind are stored in, whatever they are computed in
BYTES_PER_NUMBER = 2
WORD_BYTES = 4
# packed weights carry their true shape, two int64
SHAPE_BYTES = 16


def checkpoint_bytes(model: PreTrainedModel) -> int:
    """Payload of the checkpoint: packed integers and 16-bit scales of quantized layers, 2 bytes for any other number.

    Removed experts and channels take nothing; tensors that several modules share count once.
    """
    quantized = _quantized_linears(model)
    numel: dict[int, int] = {}
    for name, tensor in model.state_dict().items():
        owner, _, leaf = name.rpartition(".")
        if owner not in quantized or leaf == "bias":
            numel[tensor.data_ptr()] = tensor.numel()
    return BYTES_PER_NUMBER * sum(numel.values()) + sum(_packed_bytes(*found) for found in quantized.values())


def ideal_sparse_bytes(model: PreTrainedModel) -> int:
    """The same, but zero weights of experts take nothing and each weight of an expert one bit of a mask."""
    scheme_of = dict(_quantized_linears(model).values())
    saved_bits = 0
    for block in find_moe_layers(model):
        for mlp in block.mlps:
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
