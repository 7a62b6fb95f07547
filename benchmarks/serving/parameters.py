"""Functions that run in the engine's process: they fill weights with random numbers, count bytes and routed tokens.

They are passed to ``LLM.apply_model`` and ``LLM.collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

NIBBLE_DEVIATION = 4.18
"""Standard deviation of packed values: -7 to 7, 0 twice as likely as any other. Also used for 8-bit floats."""

SMALL_BYTES = 2**20

RAGGED_METHOD = "RaggedExpertsMethod"
"""The class that runs the experts of ragged checkpoints."""


@torch.inference_mode()
def fill_at_random(model: Any, seed: int) -> None:
    """Fill the parameters of a loaded model with random numbers, in place, so that captured graphs use them.

    vLLM's own random weights are the same in every layer, and its packed words are uninitialized memory. If that is
    zero, cards need less power and run faster. This function makes packed values random, sets weights of norms to 1,
    and chooses scales and other weights such that the norm of hidden states does not change from layer to layer.

    Args:
        model: a vLLM model after loading.
        seed: the seed of each parameter is this number plus the parameter's index.
    """
    deviation = model.config.hidden_size**-0.5
    # attention with random weights averages over the sequence; if its output were larger than the embeddings, hidden
    # states would be nearly equal after a few layers, and all tokens would be routed to the same experts
    embedding_deviation = 2 * model.config.num_hidden_layers**0.5
    for number, (name, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator(parameter.device).manual_seed(seed + number)
        if not parameter.is_floating_point():
            # packed words are named "weight" in some releases; other integers are shapes and orders of columns
            if name.endswith(("weight_packed", "weight")):
                fill_packed(parameter, generator)
            else:
                assert parameter.nbytes < SMALL_BYTES, f"{name} may have weights, but was not filled"
        elif name.endswith("scale"):
            typical = deviation / NIBBLE_DEVIATION
            parameter.uniform_(0.5 * typical, 1.5 * typical, generator=generator)
        elif parameter.itemsize == 1:
            wide = torch.empty(parameter.shape, dtype=torch.bfloat16, device=parameter.device)
            parameter.copy_(wide.normal_(0, NIBBLE_DEVIATION, generator=generator))
        elif "norm" in name:
            parameter.fill_(1)
        else:
            parameter.normal_(0, embedding_deviation if "embed_tokens" in name else deviation, generator=generator)


def fill_packed(words: torch.Tensor, generator: torch.Generator) -> None:
    """Fill integers with random nibbles of 1 to 15, which encode -7 to 7; nibbles of 0 are replaced by 8.

    With nibbles of 0, the mean of the values would be below zero. One direction of hidden states would then grow from
    layer to layer, until they are nearly equal and all tokens are routed to a few experts.
    """
    limits = torch.iinfo(words.dtype)
    words.random_(limits.min, limits.max + 1, generator=generator)
    for shift in range(0, limits.bits, 4):
        words |= (words >> shift & 0xF == 0).to(words.dtype) << (shift + 3)


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters; each storage is counted once."""
    return _stored_bytes(model.parameters())


def expert_bytes(model: torch.nn.Module) -> int:
    """Bytes of the routed experts; each storage is counted once."""
    return _stored_bytes(parameter for name, parameter in model.named_parameters() if ".routed_experts." in name)


def _stored_bytes(parameters: Iterable[torch.Tensor]) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    return sum(storages.values())


def loading_bytes(worker: Any) -> int:
    """Device memory that loading the model took, as measured by the engine."""
    return int(worker.model_runner.model_memory_usage)


def expert_methods(model: torch.nn.Module) -> list[str]:
    """Class names of the methods that run the routed experts."""
    return sorted({type(method).__name__ for method in _methods(model)})


def record_routing(model: torch.nn.Module, tokens: int) -> None:
    """Make every router store the experts of the first ``tokens`` tokens of each batch with at least that many tokens.

    Routers run in Python only if no graph is replayed, that is for more tokens than the largest graph has.
    """
    for router in _routers(model):
        router.select_experts = _recording(router, tokens)


def distinct_experts(model: torch.nn.Module) -> float | None:
    """Number of different experts of the recorded tokens, the mean over layers; ``None`` if nothing was recorded."""
    counts = [len(router.recorded_ids.unique()) for router in _routers(model) if router.recorded_ids is not None]
    return sum(counts) / len(counts) if counts else None


def _routers(model: torch.nn.Module) -> list[Any]:
    owners = (module for module in model.modules() if hasattr(module, "router"))
    routers = {id(owner.router): owner.router for owner in owners}
    return [router for router in routers.values() if hasattr(router, "select_experts")]


def _recording(router: Any, tokens: int) -> Any:
    select_experts, router.recorded_ids = router.select_experts, None

    def select(*args: Any, **kwargs: Any) -> Any:
        weights_TK, ids_TK = select_experts(*args, **kwargs)
        if len(ids_TK) >= tokens:
            router.recorded_ids = ids_TK[:tokens].clone()
        return weights_TK, ids_TK

    return select


def count_tokens(model: torch.nn.Module) -> None:
    """Make every layer of ragged experts count the tokens that are routed to each expert, from now on.

    A captured graph does not count when it is replayed.
    """
    for method in _ragged_methods(model):
        method.apply = _counting(method)


def counted_tokens(model: torch.nn.Module) -> dict[str, dict[str, list[int]]]:
    """For each layer, the channels that this rank holds of every expert, and the tokens that were routed to it."""
    return {
        method.name: {"widths": list(method.storage.local.widths_E), "tokens": method.tokens_E.tolist()}
        for method in _ragged_methods(model)
    }


def _ragged_methods(model: torch.nn.Module) -> list[Any]:
    return [method for method in _methods(model) if type(method).__name__ == RAGGED_METHOD]


def _methods(model: torch.nn.Module) -> list[Any]:
    """The methods that run the routed experts of each layer."""
    routed = (module for name, module in model.named_modules() if name.endswith("routed_experts"))
    return [getattr(module, "quant_method", None) for module in routed]


def _counting(method: Any) -> Any:
    apply, method.tokens_E = method.apply, torch.zeros(len(method.widths_E), dtype=torch.int64)

    def count(layer: Any, x: Any, topk_weights: Any, topk_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        method.tokens_E += torch.bincount(topk_ids.flatten().long().cpu(), minlength=len(method.tokens_E))
        return apply(layer, x, topk_weights, topk_ids, *args, **kwargs)

    return count
