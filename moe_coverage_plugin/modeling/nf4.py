"""Quantizes a model's linear layers to the 4 bits of bitsandbytes (NF4 or FP4), which transformers computes with.

bitsandbytes splits a flattened weight into blocks of 64 numbers that share a scale. A block may continue in the next
row, so experts of all widths take the same number of bytes per weight; its kernels support different sets of widths.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.utils.import_utils import is_bitsandbytes_available

from moe_coverage_plugin.installation import how_to_install
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers, linears_that_must_stay


def check_config(config: object, path: Path, quantized: bool) -> None:
    """Check, before a weight is read, that a checkpoint can be opened in 4 bits.

    Args:
        config: the caller's ``quantization_config``.
        path: of the checkpoint.
        quantized: whether its weights are stored quantized.

    Raises:
        CoverageError: the config is not for 4 bits by bitsandbytes, the checkpoint is quantized already, or
            bitsandbytes is missing.
    """
    if not isinstance(config, BitsAndBytesConfig):
        raise CoverageError(
            f"quantization_config is a {type(config).__name__}: load() quantizes by BitsAndBytesConfig only, anything "
            "else by a quantizer of llm-compressor in the recipe"
        )
    if config.load_in_8bit:
        raise CoverageError(
            "quantization_config has load_in_8bit=True, which also rounds the inputs of experts and was not tried "
            "with unequal widths: use load_in_4bit=True, or quantize to W8A16 in the recipe"
        )
    if config.quantization_method() is None:
        raise CoverageError(
            f"quantization_config has load_in_4bit={config.load_in_4bit} and "
            f"bnb_4bit_quant_type={config.bnb_4bit_quant_type!r}: give load_in_4bit=True and 'nf4' or 'fp4'"
        )
    if quantized:
        raise CoverageError(
            f"{path} is quantized already, and its weights would be rounded a second time: leave quantization_config "
            "out, or open the 16-bit checkpoint of the same pruning"
        )
    if not is_bitsandbytes_available():
        raise CoverageError(
            f"load_in_4bit=True needs bitsandbytes, which is missing here or too old: {how_to_install('nf4')}"
        )


@torch.no_grad()
def quantize_linears(model: PreTrainedModel, config: BitsAndBytesConfig) -> None:
    """Quantize linear layers of any widths to 4 bits, in place, each on its device.

    Routers, gates of shared experts, the output head and the modules in the config's ``llm_int8_skip_modules`` stay
    in 16 or 32 bits.

    Args:
        model: with linear experts.
        config: checked by :func:`check_config`.
    """
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    config = copy.deepcopy(config)
    config.llm_int8_skip_modules = [*(config.llm_int8_skip_modules or ()), *_skipped_names(model)]
    quantizer = Bnb4BitHfQuantizer(config, pre_quantized=False)
    linears = {name: module for name, module in model.named_modules() if type(module) is Linear}
    quantizer.preprocess_model(model, device_map=None)
    for name, linear in linears.items():
        packed = model.get_submodule(name)
        if isinstance(packed, Linear4bit):
            # its parameter has the options of the config, but no values
            weight: Any = Params4bit(linear.weight.detach(), requires_grad=False, **packed.weight.__dict__)
            packed.weight = weight.to(linear.weight.device)
            packed.bias = linear.bias
            # bitsandbytes 0.50 packs weights for CPUs that multiply bfloat16; with that packing, most widths raise,
            # experts without tokens end the process, and the weight cannot be read back
            # patch: nf4-cpu-packing
            packed.support_avx512bf16_for_cpu = False
            # frees the weight, or all weights would be in memory twice
            linear.weight = None  # pyright: ignore[reportAttributeAccessIssue]
    quantizer.postprocess_model(model)
    opened: Any = model
    opened.hf_quantizer = quantizer


def dense_weight(linear: Any) -> Tensor:
    """Return the weight of a linear layer, dequantized to its original dtype if it is in 4 bits."""
    if getattr(linear.weight, "quant_state", None) is None:
        return linear.weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(linear.weight.data, linear.weight.quant_state)


def remove_quantization_config(model: PreTrainedModel) -> None:
    """Mark a model as not quantized, after its last weight in 4 bits was replaced."""
    unquantized: Any = model
    unquantized.hf_quantizer.remove_quantization_config(model)
    unquantized.is_loaded_in_4bit = False


def _skipped_names(model: PreTrainedModel) -> list[str]:
    """Patterns for ``llm_int8_skip_modules`` that match exactly one module each."""
    routing = linears_that_must_stay(find_moe_layers(model)).values()
    return [f"{re.escape(name)}$" for name in (*routing, *get_keys_to_not_convert(model))]
