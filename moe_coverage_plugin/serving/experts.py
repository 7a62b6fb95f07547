"""vLLM's view of our experts: allocates them at their true size, checks what is loaded, and runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from moe_coverage_plugin.expert_scheme import ExpertScheme
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.serving import compat
from moe_coverage_plugin.serving.deployment import refuse_options
from moe_coverage_plugin.serving.ragged_moe import ACTIVATIONS, ragged_moe
from moe_coverage_plugin.serving.router import mask_router
from moe_coverage_plugin.serving.storage import ExpertStorage

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe import FusedMoEConfig, RoutedExperts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig


class RaggedExpertsMethod(FusedMoEMethodBase):
    """Experts of one layer, each of its own width, in 16, 8 or packed 4 bits; partial sums under tensor parallelism.

    On a GPU they run in our Triton kernels; where those cannot, in plain torch, which is slow and says so.
    vLLM's runner routes before and sums over ranks after.

    Args:
        moe: vLLM's description of the layer. Its expert width is not read.
        name: module path of the layer's experts in the checkpoint.
        widths_E: channels of every expert in the checkpoint.
        scheme: how their weights are stored.

    Raises:
        CoverageError: for expert parallelism, expert balancing or adapters, and for removed experts that a table of
            token ids would still choose.
    """

    def __init__(self, moe: FusedMoEConfig, name: str, widths_E: Sequence[int], scheme: ExpertScheme) -> None:
        super().__init__(moe)
        parallel = moe.moe_parallel_config
        refuse_options(parallel.use_ep, parallel.enable_eplb, moe.is_lora_enabled)
        if 0 in widths_E and compat.chooses_by_token_table(moe):
            raise CoverageError(
                f"{name} lacks {list(widths_E).count(0)} of {len(widths_E)} experts, but its experts are chosen by a "
                "table of token ids, which no mask of router logits keeps from them: prune again with "
                "layout='padded', which removes none, or list the layer in ignore"
            )
        self.name = name
        self.widths_E = widths_E
        self.scheme = scheme
        self.router_masked = False
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
        """Register flat parameters of exactly this rank's bytes; vLLM's one width for all experts is not read.

        Raises:
            CoverageError: if the layer is not the one that the checkpoint describes, or needs what we do not compute.
        """
        if num_experts != len(self.widths_E):
            raise CoverageError(
                f"{self.name} has {len(self.widths_E)} experts in the checkpoint, the model builds {num_experts}: "
                "config.json was edited, or vLLM fuses shared experts into this layer; switch that off"
            )
        self.activation = compat.activation_name(layer)
        # Names of activations without a gate end in _no_mul, so a gated layer is left, which has an up projection.
        if self.activation not in ACTIVATIONS or compat.swiglu_constants(layer):
            raise CoverageError(
                f"{self.name} has activation {self.activation!r}, constants {compat.swiglu_constants(layer)}, known "
                f"are plain {', '.join(ACTIVATIONS)}: write layout 'padded' or 'uniform', if vLLM "
                "takes single experts of this family"
            )
        self.storage = ExpertStorage(
            self.name,
            (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name or "", layer.ckpt_down_proj_name),
            self.widths_E,
            hidden_size,
            self.scheme,
            rank=self.moe.moe_parallel_config.tp_rank,
            world_size=self.moe.moe_parallel_config.tp_size,
        )
        self.storage.create_parameters(layer, params_dtype, self.moe.has_bias)
        self.layer_name = layer.layer_name
        # The runner that owns the router enters this table after its experts are built.
        self._mixture_layers = compat.mixture_layers()
        self._reads_checkpoint = not compat.loads_dummy_weights()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Make sure that every byte came from the checkpoint, and mask removed experts in the layer's router.

        Raises:
            CoverageError: naming tensors that are missing.
        """
        if self._reads_checkpoint:
            self.storage.check_complete()
        removed = [expert for expert, width in enumerate(self.widths_E) if width == 0]
        router = self._mixture_layers[self.layer_name].router
        compat.complete_cpu_router(router)
        if removed and not self.router_masked:
            mask_router(router, removed, len(self.widths_E), next(layer.parameters()).device)
            self.router_masked = True
        self._prepare_kernels(layer)

    def _prepare_kernels(self, layer: torch.nn.Module) -> None:
        """Bring the weights into the kernels' layout, in place, or say why plain torch computes."""
        local, device, group_size = self.storage.local, next(layer.parameters()).device, self.scheme.group_size
        if device.type != "cuda":
            announce_slow_path(f"the kernels need a CUDA device, the weights are on {device.type}")
            return
        # a build of vLLM for CPUs need not have Triton
        from moe_coverage_plugin.serving.kernels import compile_ahead, prepare, run_kernels, unsupported_reason

        capability = torch.cuda.get_device_capability(device)
        reason = unsupported_reason(local.widths_E, local.hidden, group_size, capability, self.scheme.bits)
        if reason is not None:
            announce_slow_path(reason)
            return
        tensors = self.storage.parameters(layer)
        weights = prepare(tensors, widths_E=local.widths_E, hidden=local.hidden, group_size=group_size)
        # what was padded is a copy: nothing may be held twice
        for name, tensor in zip(self.storage.parameter_names, weights.tensors, strict=True):
            if tensor is not None:
                self.storage.replace_parameter(layer, name, tensor)
        self.kernels = partial(run_kernels, weights=weights)
        # else the first request of some length would wait for the compiler
        of_layer = self.activation, layer.apply_router_weight_on_input
        if compile_ahead(weights, self.moe.experts_per_token, self.moe.in_dtype, *of_layer):
            logger.info("Kernels for experts of unequal width are compiled")

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:  # noqa: ARG002
        """None of vLLM's kernels runs, so there is nothing to tell them."""
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
        """This rank's part of the routed experts' output, ``[tokens, hidden]``; shared experts are the runner's."""
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


@cache
def announce_slow_path(reason: str) -> None:
    """Once per reason and process, not per layer."""
    logger.warning(f"Experts of unequal width run in plain torch, many times slower than kernels: {reason}")
