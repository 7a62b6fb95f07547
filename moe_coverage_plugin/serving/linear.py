"""4-bit linear layers on builds of vLLM that have no good kernel for them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

from moe_coverage_plugin.serving.packing import dequantize, unpack_zero_points

# vLLM configures the loggers below its own name
logger = init_logger(f"vllm.{__name__}")


class DecompressedLinearMethod(LinearMethodBase):
    """Loads packed 4-bit weights and decompresses them, which takes four times the memory of these layers.

    Args:
        scheme: vLLM's 4-bit scheme, which loads and shards the packed parameters.
    """

    # patch: cpu-w4a16-linear
    def __init__(self, scheme: CompressedTensorsWNA16) -> None:
        logger.warning_once(
            "This build of vLLM has no good kernel for 4-bit linear layers: layers outside the experts are "
            "decompressed at load and take four times their stored memory"
        )
        self.scheme = scheme
        self.plain = UnquantizedLinearMethod()

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the packed parameters of vLLM's scheme.

        Args:
            layer: the linear layer.
            input_size_per_partition: input features on this rank.
            output_partition_sizes: output features on this rank, of each layer that is fused into this one.
            input_size: input features on all ranks.
            output_size: output features on all ranks.
            params_dtype: dtype of scales.
            **extra_weight_attrs: vLLM's ``weight_loader``, and others that are not read.
        """
        self.scheme.create_weights(
            layer=layer,
            input_size=input_size,
            input_size_per_partition=input_size_per_partition,
            output_partition_sizes=output_partition_sizes,
            output_size=output_size,
            params_dtype=params_dtype,
            weight_loader=extra_weight_attrs["weight_loader"],
        )

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Replace the packed parameters by the weight that they represent.

        Args:
            layer: the linear layer.
        """
        packed: Any = layer.weight_packed
        scale: Any = layer.weight_scale
        columns: Any = layer.input_size_per_partition
        names, zero_point = ["weight_packed", "weight_scale", "weight_shape"], None
        if not self.scheme.symmetric:
            words: Any = layer.weight_zero_point
            zero_point = unpack_zero_points(words.data, len(packed))
            names.append("weight_zero_point")
        weight = dequantize(packed.data, scale.data, columns, zero_point)
        for name in names:
            delattr(layer, name)
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
        self.plain.process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute ``x @ weight.T + bias``.

        Args:
            layer: the linear layer.
            x: ``[..., A]``.
            bias: ``[O]``.

        Returns:
            ``[..., O]``.
        """
        return self.plain.apply(layer, x, bias)
