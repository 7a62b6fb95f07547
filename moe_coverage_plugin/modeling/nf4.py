"""Opens a model's linear layers in the 4 bits of bitsandbytes (NF4 or FP4), which transformers computes with.

bitsandbytes cuts a weight, row after row, into blocks of 64 numbers that share a scale. Blocks run on from row to row,
so that experts of all widths take the same bytes a number; kernels differ in what widths they take.
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

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.modeling.moe_layers import find_moe_layers, linears_that_must_stay


def check_config(config: object, path: Path, quantized: bool) -> None:
    """Refuse what cannot be opened in 4 bits, before a weight is read.

    Args:
        config: what the caller gave as ``quantization_config``.
        path: of the checkpoint.
        quantized: its weights are stored quantized.

    Raises:
        CoverageError: another kind of quantization than 4 bits by bitsandbytes, a checkpoint that is quantized
            already, or bitsandbytes is missing.
    """
    if not isinstance(config, BitsAndBytesConfig):
        raise CoverageError(
            f"quantization_config is a {type(config).__name__}: load() quantizes by BitsAndBytesConfig only, anything "
            "else by a quantizer of llm-compressor in the recipe"
        )
    if config.load_in_8bit:
        raise CoverageError(
            "quantization_config has load_in_8bit=True, which also rounds what experts read and was not tried with "
            "unequal widths: use load_in_4bit=True, or quantize to W8A16 in the recipe"
        )
    if config.quantization_method() is None:
        raise CoverageError(
            f"quantization_config has load_in_4bit={config.load_in_4bit} and "
            f"bnb_4bit_quant_type={config.bnb_4bit_quant_type!r}: give load_in_4bit=True and 'nf4' or 'fp4'"
        )
    if quantized:
        raise CoverageError(
            f"{path} is quantized already, and its weights would be rounded a second time: leave quantization_config "
            "out, or give the 16-bit checkpoint of the same pruning"
        )
    if not is_bitsandbytes_available():
        raise CoverageError(
            "4 bits by bitsandbytes need that package, which is missing here or too old: "
            'pip install "moe-coverage-plugin[nf4]"'
        )


@torch.no_grad()
def quantize_linears(model: PreTrainedModel, config: BitsAndBytesConfig) -> None:
    """Put linear layers, of whatever widths, into 4 bits, in place and where they lie.

    Routers, gates of shared experts and the output head stay as they are, as does what the config's
    ``llm_int8_skip_modules`` names.
    """
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    config = copy.deepcopy(config)
    config.llm_int8_skip_modules = [*(config.llm_int8_skip_modules or ()), *_names_that_stay(model)]
    quantizer = Bnb4BitHfQuantizer(config, pre_quantized=False)
    linears = {name: module for name, module in model.named_modules() if type(module) is Linear}
    quantizer.preprocess_model(model, device_map=None)
    for name, linear in linears.items():
        packed = model.get_submodule(name)
        if isinstance(packed, Linear4bit):
            # the parameter that it has knows the config and holds nothing
            weight: Any = Params4bit(linear.weight.detach(), requires_grad=False, **packed.weight.__dict__)
            packed.weight = weight.to(linear.weight.device)
            packed.bias = linear.bias
            # packed for CPUs that multiply bfloat16, most widths stop, experts without tokens end the process, and
            # nobody can read the weight (bitsandbytes 0.50)
            packed.support_avx512bf16_for_cpu = False
            # or all weights would be held twice
            linear.weight = None  # pyright: ignore[reportAttributeAccessIssue]
    quantizer.postprocess_model(model)
    opened: Any = model
    opened.hf_quantizer = quantizer


def dense_weight(linear: Any) -> Tensor:
    """What a linear layer multiplies by: its own weight, or that of 4 bits in the dtype that it had before."""
    if getattr(linear.weight, "quant_state", None) is None:
        return linear.weight
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(linear.weight.data, linear.weight.quant_state)


def forget_quantization(model: PreTrainedModel) -> None:
    """Call a model whole again that holds no weight in 4 bits any more."""
    whole: Any = model
    whole.hf_quantizer.remove_quantization_config(model)
    whole.is_loaded_in_4bit = False


def _names_that_stay(model: PreTrainedModel) -> list[str]:
    """Patterns that each match one module, in the way that transformers looks for them."""
    routing = linears_that_must_stay(find_moe_layers(model)).values()
    return [f"{re.escape(name)}$" for name in (*routing, *get_keys_to_not_convert(model))]
