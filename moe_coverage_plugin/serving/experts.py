"""The method that vLLM calls for experts of unequal width: allocates them at their size, checks and runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.serving import compat
from moe_coverage_plugin.serving.parallel_options import check_balancing
from moe_coverage_plugin.serving.ragged_moe import ACTIVATIONS, ragged_moe
from moe_coverage_plugin.serving.ragged_weights import IDS_DTYPE
from moe_coverage_plugin.serving.router import check_mask, mask_router, route_gathered_tokens
from moe_coverage_plugin.serving.storage import ExpertStorage

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

# vLLM configures the loggers below its own name
logger = init_logger(f"vllm.{__name__}")


class RaggedExpertsMethod(FusedMoEMethodBase):
    """Experts of one layer, each of its own width, in 16 bits, 8-bit floats or packed 4 bits.

    On a GPU they run in our Triton kernels. If the kernels cannot run them, plain torch does, which is slow and logged
    as a warning. vLLM's runner routes tokens before and, under tensor parallelism, sums the outputs of ranks after.

    Args:
        moe: vLLM's description of the layer. Its expert width is not read.
        name: module path of the layer's experts in the checkpoint.
        widths_E: channels of every expert in the checkpoint.
        scheme: how their weights are stored.
        holders_E: under expert parallelism, the rank that holds each expert. Experts that other ranks hold keep their
            numbers, but have width 0 here.

    Raises:
        CoverageError: expert balancing is switched on, or a table of token ids would still choose removed experts.
    """

    def __init__(
        self,
        moe: FusedMoEConfig,
        name: str,
        widths_E: Sequence[int],
        scheme: ExpertScheme,
        holders_E: Sequence[int] | None = None,
    ) -> None:
        super().__init__(moe)
        check_balancing(moe.moe_parallel_config.enable_eplb)
        if 0 in widths_E and compat.chooses_by_token_table(moe):
            raise CoverageError(
                f"{name} lacks {list(widths_E).count(0)} of {len(widths_E)} experts, but its experts are chosen by a "
                "table of token ids, which a mask of router logits does not change: prune again with "
                "layout='padded', which removes none, or list the layer in ignore"
            )
        self.name = name
        self.widths_E = widths_E
        self.scheme = scheme
        self.holders_E = holders_E
        self.router_prepared = False
        self.kernels: Callable[..., torch.Tensor] | None = None

    def create_weights(
        self,
        layer: RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,  # noqa: ARG002  # vLLM's signature, here and below
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,  # noqa: ARG002
    ) -> None:
        """Register flat parameters of exactly this rank's bytes.

        Args:
            layer: the module that holds the parameters.
            num_experts: experts that vLLM builds on this rank.
            hidden_size: input and output features of an expert.
            intermediate_size_per_partition: vLLM's one width for all experts, which is not read.
            params_dtype: dtype of plain weights, scales and biases.
            **extra_weight_attrs: vLLM's loader and others, which are not read.

        Raises:
            CoverageError: the checkpoint describes another layer, or the layer has an activation that is not
                implemented.
        """
        built = num_experts + compat.experts_on_other_ranks(self.moe)
        if built != len(self.widths_E):
            raise CoverageError(
                f"{self.name} has {len(self.widths_E)} experts in the checkpoint, vLLM builds {built}: restore "
                "config.json if it was edited, or switch off the fusion of shared experts into this layer"
            )
        self.activation = compat.activation_name(layer)
        # names of activations without a gate end in _no_mul, so a known activation belongs to a layer with gate and up
        if self.activation not in ACTIVATIONS or compat.swiglu_constants(layer):
            raise CoverageError(
                f"{self.name} has activation {self.activation!r}, constants {compat.swiglu_constants(layer)}, known "
                f"are plain {', '.join(ACTIVATIONS)}: prune again with layout='padded' or 'uniform', if vLLM loads "
                "single experts of this family"
            )
        parallel, entire = self.moe.moe_parallel_config, self.holders_E is not None
        self.storage = ExpertStorage(
            self.name,
            (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name or "", layer.ckpt_down_proj_name),
            self.widths_E,
            hidden_size,
            self.scheme,
            rank=parallel.ep_rank if entire else parallel.tp_rank,
            world_size=parallel.ep_size if entire else parallel.tp_size,
            holders_E=self.holders_E,
        )
        self.storage.create_parameters(layer, params_dtype, self.moe.has_bias)
        self.layer_name = layer.layer_name
        # vLLM enters the runner, which owns the router, into this table after it has built the experts
        self._runners = compat.moe_runners()
        self._reads_checkpoint = not compat.loads_dummy_weights()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Check that every parameter was loaded, mask removed experts in the router, and prepare the kernels.

        Args:
            layer: the module that holds the parameters.

        Raises:
            CoverageError: tensors are missing, or the router still selects removed experts.
        """
        if self._reads_checkpoint:
            self.storage.check_complete()
        self._prepare_router(next(layer.parameters()).device)
        self._prepare_kernels(layer)

    def _prepare_router(self, device: torch.device) -> None:
        removed = [expert for expert, width in enumerate(self.widths_E) if width == 0]
        router = self._runners[self.layer_name].router
        compat.complete_cpu_router(router)
        # methods that are replaced stay so when weights are loaded again
        if self.router_prepared:
            return
        if compat.gathers_tokens(self.moe):
            route_gathered_tokens(router)
        if removed:
            mask_router(router, removed, len(self.widths_E), device)
        self.router_prepared = True
        # random correction biases may prefer removed experts
        if removed and self._reads_checkpoint:
            dtypes = self.moe.in_dtype, compat.router_logits_dtype(self.moe)
            check_mask(router, removed, len(self.widths_E), self.storage.local.hidden, device, *dtypes)

    def _prepare_kernels(self, layer: torch.nn.Module) -> None:
        """Bring the weights into the kernels' layout, in place, or log why plain torch computes."""
        local, device, group_size = self.storage.local, next(layer.parameters()).device, self.scheme.group_size
        if device.type != "cuda":
            announce_slow_path(f"the kernels need a CUDA device, the weights are on {device.type}")
            return
        # builds of vLLM for CPUs may lack Triton
        from moe_coverage_plugin.serving.kernels import compile_ahead, prepare, run_kernels, unsupported_reason

        capability = torch.cuda.get_device_capability(device)
        reason = unsupported_reason(local.widths_E, local.hidden, group_size, capability, self.scheme.bits)
        if reason is not None:
            announce_slow_path(reason)
            return
        tensors = self.storage.parameters(layer)
        weights = prepare(tensors, widths_E=local.widths_E, hidden=local.hidden, group_size=group_size)
        # a padded tensor is a copy, and the loaded one must not stay in memory
        for name, tensor in zip(self.storage.parameter_names, weights.tensors, strict=True):
            if tensor is not None:
                self.storage.replace_parameter(layer, name, tensor)
        self.kernels = partial(run_kernels, weights=weights)
        # otherwise the first request of some length waits for the compiler
        of_layer = self.activation, layer.apply_router_weight_on_input
        if compile_ahead(weights, self.moe.experts_per_token, self.moe.in_dtype, *of_layer):
            logger.info("Kernels for experts of unequal width are compiled")

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """The dtype that vLLM's runner asks routers for; kernels are compiled for it before the first request."""
        return IDS_DTYPE

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:  # noqa: ARG002
        """Return a description without scales, because none of vLLM's kernels runs."""
        return compat.no_quantization()

    def apply(
        self,
        layer: RoutedExperts,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,  # noqa: ARG002
        shared_experts_input: torch.Tensor | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Compute this rank's part of the routed experts' output; vLLM's runner computes shared experts.

        Args:
            layer: the module that holds the parameters.
            x: hidden states ``[T, H]``.
            topk_weights: routing weights ``[T, K]``.
            topk_ids: expert numbers ``[T, K]``.
            shared_experts: not read.
            shared_experts_input: not read.

        Returns:
            ``[T, H]`` in the dtype of ``x``.
        """
        if self.kernels is not None:
            options = {"activation": self.activation, "weight_on_input": layer.apply_router_weight_on_input}
            return self.kernels(x, topk_weights, topk_ids, **options)
        return ragged_moe(
            x,
            topk_weights,
            topk_ids,
            self.storage.parameters(layer),
            widths_E=list(self.storage.local.widths_E),
            group_size=self.scheme.group_size or 0,
            activation=self.activation,
            weight_on_input=layer.apply_router_weight_on_input,
        )


def announce_slow_path(reason: str) -> None:
    """Log a warning, once for each reason and not for each layer."""
    logger.warning_once("Experts of unequal width run in plain torch, many times slower than kernels: %s", reason)
