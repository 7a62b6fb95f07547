"""The calibration pass that fits the kept columns of each ``down_proj`` to the output of the unpruned expert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from llmcompressor.core import active_session
from torch import Tensor
from torch.nn import Module

from moe_coverage_plugin.calibration.gram import GramObserver
from moe_coverage_plugin.calibration.token_mask import TokenMask
from moe_coverage_plugin.core.reconstruction import reconstruct_down
from moe_coverage_plugin.modeling.compute_dtype import fast_compute_dtype
from moe_coverage_plugin.modeling.grouped_experts import grouped_experts
from moe_coverage_plugin.modeling.moe_layers import MoELayer, projections
from moe_coverage_plugin.modeling.router_mask import mask_router
from moe_coverage_plugin.modeling.slicing import prune_layer, remove_expert


class ReconstructionPass:
    """Observes the layers in a pass of the toolkit's sequential pipeline, and prunes each after its last batch.

    Later layers are so fitted to the outputs of the layers that are pruned already.

    Args:
        model: the model of the run.
        layers: the layers to prune.
        kept: for each layer's name, the indices of the kept channels of every expert.
        padded_width: width that experts are padded to with zeros; ``None``: not padded.
        batches: the calibration data.
    """

    def __init__(
        self,
        model: Module,
        layers: Sequence[MoELayer],
        kept: dict[str, list[Tensor]],
        padded_width: int | None,
        batches: Iterable[Mapping[str, Any]],
    ):
        """Prepare the layers."""
        self._kept, self._padded_width = kept, padded_width
        # the state of the random generator is restored, so that the pass draws the same samples
        with torch.random.fork_rng(devices=[]):
            self._token_mask = TokenMask(batches)
        self._state = active_session().state
        self._dtype = ExitStack()
        self._dtype.enter_context(fast_compute_dtype(model))
        self._observed = [self._observe(layer) for layer in layers]

    def on_embedding(self, module: Module, args: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of the input embedding, which sees the token ids of a batch."""
        self._token_mask.on_embedding(self._state.current_batch_idx, module, args)

    def prune_completed(self) -> None:
        """Fit and prune the layers that all batches have passed.

        At the end of a subgraph, a layer has seen either none or all of the batches. The matrices of an observer are
        too large to keep for all layers.
        """
        for observed in [observed for observed in self._observed if observed[0].has_batches]:
            self._observed.remove(observed)
            observer, grouped = observed
            grouped.close()
            kept_E = self._kept.pop(observer.layer.name)
            prune_layer(observer.layer, kept_E, self._padded_width, _fitted_columns(observer, kept_E))

    def close(self) -> None:
        """End the pass."""
        self._dtype.close()
        assert not self._observed, f"{len(self._observed)} layers saw no batch"

    def _observe(self, layer: MoELayer) -> tuple[GramObserver, ExitStack]:
        # experts are removed before the pass, so that their tokens are already routed to the kept experts
        for index, kept_N in enumerate(self._kept[layer.name]):
            if kept_N.numel() == 0 and self._padded_width is None:
                remove_expert(layer, index)
        mask_router(layer)
        observer, grouped = GramObserver(layer), ExitStack()
        grouped.enter_context(grouped_experts(layer, observer.observe, self._real_tokens))
        return observer, grouped

    def _real_tokens(self, tokens: int) -> Tensor | None:
        return self._token_mask.of(self._state.current_batch_idx, tokens)


@torch.no_grad()
def _fitted_columns(observer: GramObserver, kept_E: list[Tensor]) -> dict[int, Tensor]:
    """Fitted columns of every ``down_proj`` by expert, without experts that no token reached."""
    return {
        index: reconstruct_down(projections(observer.layer.mlps[index])["down_proj"].weight, gram_II, kept_E[index])
        for index, gram_II in observer.grams().items()
    }
