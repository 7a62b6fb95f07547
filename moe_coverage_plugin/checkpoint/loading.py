"""Reads pruned checkpoints back into transformers, strict about every tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.offload import remove_dispatch
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_metadata import QuantizationMetadata
from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
from llmcompressor.modeling.moe.linearize import get_non_linearized_moes
from llmcompressor.transformers.compression.compressed_tensors_utils import modify_save_pretrained
from loguru import logger
from tqdm import tqdm
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers import __version__ as version
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion

from moe_coverage_plugin.checkpoint.expert_names import keep_family_names
from moe_coverage_plugin.checkpoint.model_card import read_origin
from moe_coverage_plugin.checkpoint.saving import STATUS_KEY, PruningRecord, save_with_manifest
from moe_coverage_plugin.expert_scheme import WIDTH_KEYS
from moe_coverage_plugin.files.weights import open_weights, weight_files
from moe_coverage_plugin.manifest import CONFIG_KEY, REPORT_NAME, CoverageError, Manifest, read_json
from moe_coverage_plugin.modeling.expert_lists import linearize_expert_lists
from moe_coverage_plugin.modeling.moe_layers import MoELayer, find_moe_layers
from moe_coverage_plugin.modeling.nf4 import check_config, quantize_linears
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import prune_layer


def load(
    path: str | Path,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    quantization_config: BitsAndBytesConfig | None = None,
) -> PreTrainedModel:
    """Open a pruned checkpoint as a transformers model on the CPU whose experts have their own widths.

    Quantized weights are decompressed. Activations stay as they are, also where engines quantize them (FP8_DYNAMIC),
    of which a warning tells. The model can be run, fine-tuned, saved (``save_pretrained`` writes our layout
    again) and passed to ``oneshot`` to be quantized. With a ``quantization_config`` it can be run and moved to a
    device, but not saved.

    Args:
        path: checkpoint directory, one file or sharded.
        dtype: cast floating-point weights; the checkpoint's own where not given. What a family keeps in float32, such
            as correction biases of routers, stays so.
        trust_remote_code: run Python files of the checkpoint that its config names as the model's code. Without it
            they are passed over where transformers has the architecture itself, and refused where it has not.
        quantization_config: ``BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")`` puts the linear
            layers of a 16-bit checkpoint into the 4 bits of bitsandbytes, those of attention, too. Routers, gates of
            shared experts and the output head are left out, and what its ``llm_int8_skip_modules`` adds to them. Every
            width works, multiples of 64 have the faster kernels. Needs the extra ``nf4``.

    Raises:
        CoverageError: no pruned checkpoint, a damaged or incomplete one, a tensor missing, left over, or of another
            shape than its manifest says, code that is not trusted, or a ``quantization_config`` that cannot be
            followed.
    """
    path = Path(path)
    if not (path / "config.json").is_file() or (manifest := Manifest.from_checkpoint(path)) is None:
        raise CoverageError(
            f"{path} is no pruned checkpoint ({CONFIG_KEY} is not in its config.json): use AutoModelForCausalLM"
        )
    files = weight_files(path)
    report = read_json(path / REPORT_NAME) if (path / REPORT_NAME).is_file() else {}
    config, quantization = _read_config(path, manifest, trust_remote_code)
    if quantization_config is not None:
        check_config(quantization_config, path, quantization is not None)
    stored_dtype = config.dtype
    if not isinstance(stored_dtype, torch.dtype):
        raise CoverageError(f"{path / 'config.json'} has dtype {stored_dtype!r}, which torch does not know")
    model = _skeleton(config, manifest, dtype or stored_dtype, trust_remote_code)
    compressor = _expect_compressed(model, quantization) if quantization is not None else None
    _fill(model, files, dtype)
    if compressor is not None:
        compressor.decompress_model(model)
        # the toolkit dispatched it: caches hand out copies on the accelerator, where a change of dtype would be lost
        remove_dispatch(model)
        for module in model.modules():
            QuantizationMetadata.clear_quantization(module)
        dtype_of = _dtypes(model, dtype or stored_dtype)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtype_of(name))
    if quantization_config is not None:
        quantize_linears(model, quantization_config)
    for layer in find_moe_layers(model):
        mask_router(layer)
    if (path / "generation_config.json").is_file():
        with _foreign_reader(path / "generation_config.json"):
            model.generation_config = GenerationConfig.from_pretrained(path)
    modify_save_pretrained(model)
    record = PruningRecord(
        manifest.layout,
        manifest.intermediate_size,
        manifest.block_size,
        manifest.provenance,
        report,
        origin=read_origin(str(path)),
    )
    save_with_manifest(model, record)
    return model.eval()


def _read_config(
    path: Path, manifest: Manifest, trust_remote_code: bool
) -> tuple[PretrainedConfig, dict[str, Any] | None]:
    """The model's config as it was before pruning, and its quantization where it has one."""
    file = path / "config.json"
    with _foreign_reader(file):
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    config.__dict__.pop(CONFIG_KEY, None)
    quantization = config.__dict__.pop("quantization_config", None) or {}
    text_config = config.get_text_config()
    width_key = next((key for key in WIDTH_KEYS if hasattr(text_config, key)), None)
    if width_key is None or not isinstance(quantization, Mapping):
        raise CoverageError(f"{file} describes no mixture of experts: it is damaged, copy the checkpoint again")
    if not trust_remote_code and "/" in str(kernel := config._attn_implementation):
        # transformers fetches such a name from the hub and runs it
        raise CoverageError(f"{file} has attention computed by {kernel}, code from elsewhere: remove it from the file")
    setattr(text_config, width_key, manifest.intermediate_size)
    config._name_or_path = str(path)
    described = {key: value for key, value in quantization.items() if key != CONFIG_KEY}
    quantized = described.get("config_groups") or described.get("kv_cache_scheme")
    return config, described if quantized else None


@contextmanager
def _foreign_reader(file: Path) -> Iterator[None]:
    """Around a toolkit's reading of a file that may say anything, which fails with any exception there is."""
    try:
        yield
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise CoverageError(f"{file} describes nothing that transformers {version} can build ({told})") from error


def _skeleton(
    config: PretrainedConfig, manifest: Manifest, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    """The model without weights, its experts linear and at the widths of the manifest."""
    names: list[str] = []
    with init_empty_weights(include_buffers=False):
        for factory in _factories(config, trust_remote_code):
            with _foreign_reader(Path(config._name_or_path) / "config.json"):
                model = factory.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
            layers = _linear_blocks(model, config)
            if sorted(names := [layer.name for layer in layers]) == sorted(manifest.widths):
                break
        else:
            raise CoverageError(
                f"the manifest names the MoE layers {list(manifest.widths)}, {config.model_type} has {names}"
            )
        for layer in layers:
            widths = manifest.widths[layer.name]
            if len(widths) != layer.num_experts:
                raise CoverageError(
                    f"{layer.name} has {layer.num_experts} experts, its manifest lists {len(widths)} widths"
                )
            prune_layer(layer, [torch.arange(width) for width in widths])
    model.config._name_or_path = config._name_or_path
    if factory is AutoModelForCausalLM and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        # the text part of a model keeps the names that it has in the whole, as if loaded from there
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    keep_family_names(model)
    return model


def _factories(config: PretrainedConfig, trust_remote_code: bool) -> list[Any]:
    """What may have built the model: of some that see, another class has their text alone, by the same config."""
    own_code = getattr(config, "auto_map", {}) if trust_remote_code else {}
    if "AutoModelForCausalLM" in own_code:
        return [AutoModelForCausalLM]
    mappings = {
        AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    }
    # transformers has the words for a config of neither
    return [factory for factory, known in mappings.items() if type(config) in known] or [AutoModelForCausalLM]


def _linear_blocks(model: PreTrainedModel, config: PretrainedConfig) -> list[MoELayer]:
    for name, module in get_non_linearized_moes(model):
        linear_experts = LinearExperts2D.get_linear_experts_cls(cast(Any, type(module)))
        model.set_submodule(name, linear_experts(getattr(module, "config", config)))
    linearize_expert_lists(model)
    return find_moe_layers(model)


def _expect_compressed(model: PreTrainedModel, quantization: dict[str, Any]) -> ModelCompressor:
    known = {key: value for key, value in quantization.items() if key in QuantizationConfig.model_fields}
    if known.get(STATUS_KEY) == CONFIG_KEY:
        known[STATUS_KEY] = QuantizationStatus.COMPRESSED
    with _foreign_reader(Path(model.config._name_or_path) / "config.json"):
        quantization_config = QuantizationConfig.model_validate(known)
    quantization_config.ignore = _names_in_model(model, quantization_config.ignore or [])
    compressor = ModelCompressor(quantization_config=quantization_config)
    apply_quantization_config(model, quantization_config)
    compressor.compress_model(model)
    for module in model.modules():
        _expect_packed_zero_point(module)
    if left_out := _computed_in_full(quantization_config):
        logger.warning(f"{model.name_or_path} is to run with {left_out} quantized, which load() leaves out")
    return compressor


def _names_in_model(model: PreTrainedModel, ignore: list[str]) -> list[str]:
    """Layers by the names of their modules, where the toolkit wrote those that they have in the files."""
    module_of = {disk: name for disk, (name, _) in _names_on_disk(model).items()}
    return [module_of.get(f"{entry}.weight", f"{entry}.weight").removesuffix(".weight") for entry in ignore]


def _expect_packed_zero_point(module: torch.nn.Module) -> None:
    """Pack the zero points of asymmetric weights, which the toolkit does with values only."""
    zero_point = getattr(module, "weight_zero_point", None)
    if zero_point is None or not hasattr(module, "weight_packed"):
        return
    weights = cast(QuantizationScheme, module.quantization_scheme).weights
    assert weights is not None, "zero points belong to weights"
    packed = pack_to_int32(torch.zeros(zero_point.shape, dtype=torch.int8), weights.num_bits, packed_dim=0)
    module.weight_zero_point = torch.nn.Parameter(packed.to("meta"), requires_grad=False)


def _computed_in_full(quantization: QuantizationConfig) -> str:
    """What of a quantization is no weight, ``activations``; empty where there is nothing."""
    schemes = [each for each in quantization.config_groups.values() if isinstance(each, QuantizationScheme)]
    activations = any(each.input_activations or each.output_activations for each in schemes)
    cache = quantization.kv_cache_scheme is not None
    return " and ".join(["activations"] * activations + ["the key-value cache"] * cache)


def _fill(model: PreTrainedModel, files: list[Path], dtype: torch.dtype | None) -> None:
    """Assign every tensor of the files to the parameter or buffer it belongs to.

    None may be left on either side.
    """
    expected = _names_on_disk(model)
    dtype_of = _dtypes(model, dtype) if dtype is not None else None
    seen: set[str] = set()
    for file in tqdm(files, desc="Loading", disable=None):
        state: dict[str, torch.Tensor] = {}
        for disk_name, tensor in _read(file):
            if disk_name not in expected:
                raise CoverageError(
                    f"{file.name} holds {disk_name}, which the model described by its manifest does not have"
                )
            if disk_name in seen:
                raise CoverageError(f"{file.name} holds {disk_name} a second time: the checkpoint mixes two writings")
            name, wanted = expected[disk_name]
            _check_tensor(model, disk_name, name, tensor, wanted)
            state[name] = tensor.to(dtype_of(name)) if dtype_of and tensor.is_floating_point() else tensor
            seen.add(disk_name)
        model.load_state_dict(state, strict=False, assign=True)
    if missing := sorted(expected.keys() - seen):
        raise CoverageError(
            f"the checkpoint lacks {len(missing)} tensors, first {missing[0]}: it was not written completely"
        )
    model.tie_weights()
    assert not any(parameter.is_meta for parameter in model.parameters()), "a parameter was left without a value"


def _dtypes(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """The dtype of a floating tensor by its name: families keep some, such as correction biases, in float32."""
    plan = model._get_dtype_plan(dtype)
    return lambda name: next((kept for part, kept in plan.items() if part in name), dtype)


def _read(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of one file."""
    with open_weights(file) as shard:
        for name in shard.keys():  # noqa: SIM118 - an open file is no mapping
            yield name, shard.get_tensor(name)


def _check_tensor(
    model: PreTrainedModel, disk_name: str, name: str, tensor: torch.Tensor, wanted: torch.Tensor
) -> None:
    if tensor.shape != wanted.shape:
        raise CoverageError(f"{disk_name} has shape {list(tensor.shape)}, the manifest says {list(wanted.shape)}")
    # numbers of one byte are nothing without their scales, so they may not stand for plain ones
    one_byte = 1 in (tensor.itemsize, wanted.itemsize)
    if tensor.is_floating_point() != wanted.is_floating_point() or (one_byte and tensor.dtype != wanted.dtype):
        raise CoverageError(f"{disk_name} has dtype {tensor.dtype}, {wanted.dtype} was written: the file is damaged")
    module, _, attribute = name.rpartition(".")
    if attribute == "weight_shape":
        # the shape of a weight before packing, which decompression believes
        shape = _unpacked_shape(model.get_submodule(module))
        if tensor.tolist() != shape:
            raise CoverageError(f"{disk_name} says {tensor.tolist()}, the manifest says {shape}: the file is damaged")


def _unpacked_shape(module: torch.nn.Module) -> list[int]:
    if isinstance(module, torch.nn.Embedding):
        return [module.num_embeddings, module.embedding_dim]
    linear = cast(torch.nn.Linear, module)
    return [linear.out_features, linear.in_features]


def _names_on_disk(model: PreTrainedModel) -> dict[str, tuple[str, torch.Tensor]]:
    """For every tensor name in the files: the name in the model, and the tensor there, without values.

    Tied copies are not in the files.
    """
    # not every family's configuration has the field
    ties = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    tied = set(model.all_tied_weights_keys) if ties else set()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    name_of = {id(tensor): name for name, tensor in state.items()}
    on_disk = revert_weight_conversion(model, dict(state))
    merged = [disk_name for disk_name, tensor in on_disk.items() if id(tensor) not in name_of]
    if merged:
        raise CoverageError(
            f"{type(model).__name__} stores {merged[0]} merged from several tensors: this family cannot be loaded"
        )
    return {disk_name: (name_of[id(tensor)], tensor) for disk_name, tensor in on_disk.items()}
