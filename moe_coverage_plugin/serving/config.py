"""The vLLM quantization configuration that claims our checkpoints: compressed-tensors with ragged experts."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

from moe_coverage_plugin.expert_scheme import (
    WIDTH_KEYS,
    ExpertScheme,
    SchemeEntry,
    expert_scheme,
    layer_entry,
    served_scheme,
)
from moe_coverage_plugin.files.quantization import check_quantization
from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest
from moe_coverage_plugin.serving import compat
from moe_coverage_plugin.serving.adapters import leave_experts_out
from moe_coverage_plugin.serving.deployment import NO_DRAFT, check_deployment, serves_experts
from moe_coverage_plugin.serving.experts import RaggedExpertsMethod
from moe_coverage_plugin.serving.linear import DecompressedLinearMethod
from moe_coverage_plugin.serving.local_files import check_local
from moe_coverage_plugin.serving.placement import experts_of_ranks

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.model_executor.layers.fused_moe import MoERunner
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

# targets name experts by their class in llm-compressor, which is Linear
LINEAR = torch.nn.Linear(1, 1, bias=False, device="meta")


class CoverageConfig(CompressedTensorsConfig):
    """vLLM's compressed-tensors with our methods for the layers that stock kernels cannot compute.

    These are experts of unequal width (layout ``ragged``), and, in builds of vLLM without a good kernel for them,
    4-bit experts of one width and 4-bit linear layers. vLLM computes all other layers, also in the layouts ``padded``
    and ``uniform``.

    Attributes:
        manifest: of the checkpoint.
        schemes: how the experts that our method computes are stored, by module path of a layer's experts.
        holders: rank that holds each of these experts, by number of expert-parallel ranks and module path.
    """

    manifest: Manifest
    schemes: dict[str, ExpertScheme]
    holders: dict[int, dict[str, list[int]]]

    @classmethod
    def override_quantization_method(
        cls,
        hf_quant_cfg: dict[str, Any],
        user_quant: str | None,  # noqa: ARG003  # vLLM's signature
        hf_config: PretrainedConfig | None = None,
        **_: Any,  # vLLM calls this for every quantized model, so a new argument must not raise an error
    ) -> Any:
        """Claim a checkpoint that has our entry; vLLM calls this in the user's process.

        Args:
            hf_quant_cfg: the checkpoint's ``quantization_config``.
            user_quant: not read.
            hf_config: the model's config.

        Returns:
            Our quantization name, or ``None`` if there is no entry.

        Raises:
            CoverageError: the entry is damaged or has an unknown schema version.
        """
        if Manifest.from_quantization_config(hf_quant_cfg) is None:
            return None
        # before vLLM's own classes read it, which expect the types that the toolkit writes
        check_quantization(hf_quant_cfg)
        compat.check_engine_config(getattr(hf_config, "architectures", None) or (), check_deployment)
        return CONFIG_KEY

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CoverageConfig:
        """Parse the checkpoint's ``quantization_config``; vLLM calls this in the user's process.

        Raises:
            CoverageError: the entry is damaged, or the experts are stored in a way that cannot be served.
        """
        self = super().from_config(config)
        assert isinstance(self, cls), "the base class builds the class that it is called on"
        manifest = Manifest.from_quantization_config(config)
        assert manifest is not None, f"a configuration without {CONFIG_KEY} was claimed"
        self.manifest = manifest
        self.schemes = self._schemes_served_by_us()
        self.holders = {}
        return self

    def _schemes_served_by_us(self) -> dict[str, ExpertScheme]:
        """Return how the experts that stock kernels cannot compute are stored, by module path."""
        quantized = bool(self.target_scheme_map)
        if not serves_experts(self.manifest, quantized):
            return {}
        entries = {name: layer_entry(name, widths, self._entry_of) for name, widths in self.manifest.widths.items()}
        if self.manifest.layout == "ragged":
            return {name: served_scheme(name, self.manifest.widths[name], entry) for name, entry in entries.items()}
        schemes = {name: expert_scheme(entry) for name, entry in entries.items()}
        return {name: s for name, s in schemes.items() if isinstance(s, ExpertScheme) and s.bits == 4}

    def _entry_of(self, path: str) -> SchemeEntry:
        return self.get_scheme_dict(LINEAR, path)

    def maybe_update_config(
        self, model_name: str, hf_config: PretrainedConfig | None = None, revision: str | None = None
    ) -> None:
        """Check the checkpoint's files, and restore the original expert width in the model's config.

        A ragged checkpoint declares an implementation of experts and a width at which stock programs stop. Models
        derive more from the width, such as that of shared experts.

        Args:
            model_name: directory or name of the checkpoint.
            hf_config: the model's config, changed in place.
            revision: of a checkpoint that is not local.

        Raises:
            CoverageError: a local checkpoint is incomplete, damaged, or not that of its manifest.
        """
        super().maybe_update_config(model_name, hf_config=hf_config, revision=revision)
        # also for stock methods, which fill a buffer with a narrower tensor without an error
        check_local(model_name, self.manifest)
        if hf_config is None or self.manifest.layout != "ragged":
            return
        # stops classes of transformers, of which vLLM uses some
        hf_config._experts_implementation = None
        text_config = hf_config.get_text_config()
        for field in WIDTH_KEYS:
            if getattr(text_config, field, None) == self.manifest.declared_width:
                setattr(text_config, field, self.manifest.intermediate_size)
                return

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return our method for a layer that stock vLLM cannot compute, and vLLM's method for the others.

        Args:
            layer: the layer that vLLM builds.
            prefix: its module path in vLLM.

        Raises:
            CoverageError: the manifest lacks a layer with experts, or this build cannot compute a linear layer.
        """
        prefix = compat.name_in_checkpoint(prefix)
        if isinstance(layer, RoutedExperts) and self.schemes:
            name = self._manifest_name(prefix)
            if name in self.schemes:
                if layer.moe_config.is_lora_enabled:
                    leave_experts_out(_are_ours)
                holders_E = self._holders(layer.moe_config.moe_parallel_config, name)
                widths_E, scheme = self.manifest.widths[name], self.schemes[name]
                return RaggedExpertsMethod(layer.moe_config, name, widths_E, scheme, holders_E)
        method = super().get_quant_method(layer, prefix)
        if isinstance(method, CompressedTensorsLinearMethod) and compat.lacks_w4a16_linear():
            return self._without_kernel(method, layer.scheme, prefix)
        return method

    def _holders(self, parallel: FusedMoEParallelConfig, name: str) -> list[int] | None:
        """Return the rank that holds each expert of a layer; ``None`` if ranks share experts."""
        if not parallel.use_ep:
            return None
        # of all layers at once, because memory is balanced over layers
        if parallel.ep_size not in self.holders:
            self.holders[parallel.ep_size] = experts_of_ranks(self.manifest, self.schemes, parallel.ep_size)
        return self.holders[parallel.ep_size][name]

    def _manifest_name(self, prefix: str) -> str:
        """Return the manifest's name of an MoE layer, found by layer number if vLLM nests the model differently.

        Raises:
            CoverageError: the manifest has no such layer.
        """
        if prefix in self.manifest.widths:
            return prefix
        number = _layer_number(prefix)
        names = [name for name in self.manifest.widths if number is not None and _layer_number(name) == number]
        if len(names) != 1:
            raise CoverageError(
                f"{prefix} is not among the {len(self.manifest.widths)} layers of the {CONFIG_KEY} entry, which must "
                "list every layer with experts: save the model again"
            )
        return names[0]

    def _without_kernel(
        self, method: CompressedTensorsLinearMethod, scheme: Any, prefix: str
    ) -> CompressedTensorsLinearMethod | DecompressedLinearMethod:
        if not isinstance(scheme, CompressedTensorsWNA16):
            return method
        if scheme.num_bits != 4:
            raise CoverageError(
                f"{prefix} has packed {scheme.num_bits}-bit weights, but builds of vLLM for CPUs compute only packed "
                "weights of 4 bits: quantize it with W4A16 or FP8_DYNAMIC, or serve it on a GPU"
            )
        return DecompressedLinearMethod(scheme)


def check_unquantized(model_name: str, hf_config: PretrainedConfig) -> None:
    """Check a checkpoint whose entry is at the top level of ``config.json``, for which vLLM asks no quantization.

    Raises:
        CoverageError: its files are damaged, or a pruned checkpoint is opened to predict several tokens.
    """
    manifest = Manifest.from_quantization_config({CONFIG_KEY: getattr(hf_config, CONFIG_KEY, None)})
    check_local(model_name, manifest)
    if manifest is not None:
        compat.check_engine_config(getattr(hf_config, "architectures", None) or (), check_deployment)
    quantization_config = getattr(hf_config, "quantization_config", None)
    # vLLM sets n_predict for a model's own draft, and then divides by it; our configs count no such layers
    if getattr(hf_config, "n_predict", None) is not None and (
        manifest is not None or Manifest.from_quantization_config(quantization_config) is not None
    ):
        raise CoverageError(NO_DRAFT.format("mtp"))


def has_ragged_experts(quantization: object) -> bool:
    """Return whether a quantization config gives every MoE layer our method, which reads no common width."""
    return isinstance(quantization, CoverageConfig) and quantization.manifest.layout == "ragged"


def _are_ours(layer: MoERunner) -> bool:
    return isinstance(layer.routed_experts.quant_method, RaggedExpertsMethod)


def _layer_number(path: str) -> int | None:
    match = re.search(r"(?:^|\.)layers\.(\d+)\.", path)
    return int(match.group(1)) if match else None
