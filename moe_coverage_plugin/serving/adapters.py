"""Adapters (LoRA) of layers other than experts: vLLM's wrappers skip experts, adapters of experts are clear errors.

Experts of unequal width have no place for the weights of an adapter, which have one width for all experts of a layer.
vLLM would stop while it wraps such experts or, if ``lora_target_modules`` leaves them out, ignore an adapter's tensors
for them without a message. Written for 0.32; names and signatures were also compared with 0.33. Lines marked
``# patch:`` are rows of ``docs/patches.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.utils import is_pp_missing_parameter

from moe_coverage_plugin.manifest import CoverageError

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.layers.fused_moe import MoERunner
    from vllm.v1.engine.input_processor import InputProcessor

# vLLM configures the loggers below its own name
logger = init_logger(f"vllm.{__name__}")

MERGE = (
    "merge it with peft (merge_and_unload) into the model that load() opens, save that and serve the result, or train "
    "an adapter of attention alone (target_modules of q_proj, k_proj, v_proj and o_proj)"
)
OF_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
"""Of the module path of a tensor or a target: PEFT and vLLM name the container of experts so in every family."""
ABSORBED = re.compile(r"\.kv_b_proj\.")
"""Of the part of latent attention that vLLM multiplies into its neighbours when weights are loaded."""
SHOWN = 3
SAFETENSORS, OTHERS = "adapter_model.safetensors", ("adapter_model.bin", "adapter_model.pt")
"""Names of an adapter's file, of which vLLM reads the first that exists."""

# configurations of the engines of this process whose adapters must leave experts alone
_guarded: list[LoRAConfig] = []


def check_lora_options(lora_config: LoRAConfig) -> None:
    """Check an engine's options for adapters.

    Raises:
        CoverageError: they name experts, or are about adapters of experts only.
    """
    named = [target for target in lora_config.target_modules or () if OF_EXPERTS.search(target)]
    if named:
        raise CoverageError(
            f"lora_target_modules has {', '.join(map(repr, named[:SHOWN]))}, but experts of unequal width take no "
            "adapter: name other layers, such as q_proj, k_proj, v_proj and o_proj, or none, and merge adapters of "
            "experts into the model before it is served"
        )
    for option in ("enable_mixed_moe_lora_format", "enable_moe_shared_loras"):
        if getattr(lora_config, option, False):
            raise CoverageError(
                f"{option} is set, which is about adapters of experts, but experts of unequal width take none: serve "
                "without it, and merge adapters of experts into the model before it is served"
            )


def check_adapter(directory: Path) -> None:
    """Check which layers an adapter changes, by the names of its tensors.

    Args:
        directory: of the adapter as PEFT saves it. One without a file of tensors is left to vLLM.

    Raises:
        CoverageError: it changes experts, or other layers whose adapters vLLM ignores without a message.
    """
    names = tensor_names(directory)
    for pattern, layers, reason in (
        (OF_EXPERTS, "experts", "experts of unequal width take no adapter"),
        (ABSORBED, "kv_b_proj", "vLLM merges these into other products and ignores their adapters, of any model"),
    ):
        found = [name for name in names if pattern.search(name)]
        if found:
            raise CoverageError(
                f"the adapter {directory} has {len(found)} tensors of {layers} ({_first(found)}), but {reason}: "
                f"{MERGE}"
            )


def tensor_names(directory: Path) -> list[str]:
    """Return the names of an adapter's tensors, without reading their values."""
    if (directory / SAFETENSORS).is_file():
        with safe_open(directory / SAFETENSORS, "pt") as file:
            return list(file.keys())
    for name in OTHERS:
        if (directory / name).is_file():
            return list(torch.load(directory / name, map_location="meta", weights_only=True))
    return []


def check_layers(directory: Path, unchanged: Sequence[str], lora_config: LoRAConfig) -> None:
    """Check that an engine applies an adapter to all of its layers; vLLM leaves out some without a message.

    Args:
        directory: of the adapter.
        unchanged: layers of the adapter that the engine does not change.
        lora_config: of the engine. With ``target_modules``, layers are left out on purpose, and a warning says so.

    Raises:
        CoverageError: layers are left out.
    """
    if not unchanged:
        return
    if lora_config.target_modules is not None:
        logger.warning(
            "The adapter %s has weights for %d layers that lora_target_modules leaves out, which stay as they are: %s",
            *(directory, len(unchanged), _first(unchanged)),
        )
        return
    raise CoverageError(
        f"the adapter {directory} changes {len(unchanged)} layers that vLLM does not adapt ({_first(unchanged)}): "
        f"{MERGE}"
    )


def unchanged_layers(manager: LoRAModelManager, adapter: LoRAModel) -> list[str]:
    """Return the layers of an adapter that an engine has on this rank and does not change.

    Among them are layers that another module calls under a name of its own, where vLLM left the layer as it was.
    """
    model: torch.nn.Module = manager.model
    wrapped = {id(layer.base_layer): name for name, layer in manager.modules.items()}
    modules = model.named_modules(remove_duplicate=False)
    called_directly = {
        wrapped[id(each)]
        for name, each in modules
        if id(each) in wrapped and isinstance(each, LinearBase) and not name.endswith(".base_layer")
    }
    changed = {*manager.modules} - called_directly
    changed |= {part for name in changed for part in manager.packed_modules.get(name, ())}
    return [name for name in adapter.loras if name not in changed and not is_pp_missing_parameter(name, model)]


def check_adapters_of_requests(lora_config: LoRAConfig) -> None:
    """Check the adapter of each request to an engine, in the user's process.

    vLLM reads an adapter in the process of the engine, which an error there would end. An adapter that vLLM will
    download is checked there, too, see ``leave_experts_out``.

    Args:
        lora_config: of the engine.

    Raises:
        AttributeError: the class that takes requests has no such method any more.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    _guarded.append(lora_config)
    validate = InputProcessor._validate_lora
    if hasattr(validate, "coverage_check"):
        return

    @wraps(validate)
    def check_and_validate(processor: InputProcessor, lora_request: LoRARequest | None) -> None:
        if lora_request is not None and any(processor.lora_config is each for each in _guarded):
            _check_unless_known(Path(lora_request.lora_path).expanduser())
        validate(processor, lora_request)

    # a mark, so that the method is replaced once
    check_and_validate.coverage_check = validate  # pyright: ignore[reportAttributeAccessIssue]
    # patch: adapters-of-requests
    InputProcessor._validate_lora = check_and_validate


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _check_unless_known(directory: Path) -> None:
    found = next((directory / name for name in (SAFETENSORS, *OTHERS) if (directory / name).is_file()), None)
    if found is not None:
        _check_state(directory, found.stat().st_mtime_ns)


@cache
def _check_state(directory: Path, _: int) -> None:
    check_adapter(directory)


def leave_experts_out(is_ours: Callable[[MoERunner], bool]) -> None:
    """Keep vLLM from wrapping experts that take no adapter, and from loading adapters that have tensors for them.

    Called in the process that builds a model, before vLLM wraps its layers.

    Args:
        is_ours: whether a layer with experts takes no adapter.

    Raises:
        AttributeError: vLLM's module or class has no such function any more.
    """
    from vllm.lora import model_manager
    from vllm.lora.utils import get_adapter_absolute_path
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.model_executor.layers.fused_moe import MoERunner

    supported, load = model_manager.get_supported_lora_modules, WorkerLoRAManager._load_adapter
    if hasattr(supported, "coverage_check"):
        return

    def experts_of(model: torch.nn.Module) -> Iterable[str]:
        modules = model.named_modules()
        return {name.rpartition(".")[2] for name, each in modules if isinstance(each, MoERunner) and is_ours(each)}

    @wraps(supported)
    def supported_without_experts(model: torch.nn.Module) -> list[str]:
        experts = experts_of(model)
        return [name for name in supported(model) if name not in experts]

    @wraps(load)
    def check_and_load(manager: WorkerLoRAManager, lora_request: LoRARequest) -> LoRAModel:
        model: Any = manager._adapter_manager.model
        if not experts_of(model):
            return load(manager, lora_request)
        directory = Path(get_adapter_absolute_path(lora_request.lora_path))
        check_adapter(directory)
        adapter = load(manager, lora_request)
        check_layers(directory, unchanged_layers(manager._adapter_manager, adapter), manager.lora_config)
        return adapter

    # a mark, so that the functions are replaced once
    supported_without_experts.coverage_check = supported  # pyright: ignore[reportAttributeAccessIssue]
    # patch: adapters-without-experts
    model_manager.get_supported_lora_modules = supported_without_experts
    # patch: adapters-without-experts
    check_and_load.coverage_check = load  # pyright: ignore[reportAttributeAccessIssue]
    WorkerLoRAManager._load_adapter = check_and_load
