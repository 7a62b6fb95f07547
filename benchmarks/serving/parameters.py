"""What is done to a model inside the engine's process: weights filled at random, counted, its routing watched.

These functions are handed to ``LLM.apply_model`` and ``LLM.collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

NIBBLE_DEVIATION = 4.18
"""Standard deviation of packed values: -7 to 7, of which 0 is twice as likely as any other. Of 8-bit floats, too."""

SMALL_BYTES = 2**20


@torch.inference_mode()
def fill_at_random(model: Any, seed: int) -> None:
    """Give a loaded model the weights of an untrained one, in whatever layout its kernels want them.

    vLLM's own random weights are the same in every layer and leave packed words as the memory was; cards draw less
    power on zeros, and run faster. Here packed values are random, scales and plain weights keep the size of hidden
    states, norms are 1. In place, so that captured graphs see it.

    Args:
        model: a vLLM model after loading.
        seed: every parameter has its own, derived from it.
    """
    deviation = model.config.hidden_size**-0.5
    # attention of random weights averages over a sequence; if that outgrew the embeddings, its tokens would look
    # alike after a few layers and be routed alike
    embedding_deviation = 2 * model.config.num_hidden_layers**0.5
    for number, (name, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator(parameter.device).manual_seed(seed + number)
        if not parameter.is_floating_point():
            # shapes and orders of columns are integers too; some releases give packed words a second name
            if name.endswith(("weight_packed", "weight")):
                fill_packed(parameter, generator)
            else:
                assert parameter.nbytes < SMALL_BYTES, f"{name} may hold weights, and was not filled"
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
    """Fill integers with random nibbles of 1 to 15, which stand for -7 to 7; 8 also in place of 0.

    With 0 among them the mean would be below zero: then one direction grows from layer to layer, in the end all
    tokens look alike, and a few experts get them all.
    """
    limits = torch.iinfo(words.dtype)
    words.random_(limits.min, limits.max + 1, generator=generator)
    for shift in range(0, limits.bits, 4):
        words |= (words >> shift & 0xF == 0).to(words.dtype) << (shift + 3)


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters, each storage once."""
    return _stored_bytes(model.parameters())


def expert_bytes(model: torch.nn.Module) -> int:
    """Bytes of the routed experts, each storage once."""
    return _stored_bytes(parameter for name, parameter in model.named_parameters() if ".routed_experts." in name)


def _stored_bytes(parameters: Iterable[torch.Tensor]) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
    return sum(storages.values())


def loading_bytes(worker: Any) -> int:
    """The engine's own figure: what its device held more of after the model was loaded than before."""
    return int(worker.model_runner.model_memory_usage)


def expert_methods(model: torch.nn.Module) -> list[str]:
    """Class names of what runs the routed experts."""
    routed = (module for name, module in model.named_modules() if name.endswith("routed_experts"))
    return sorted({type(getattr(module, "quant_method", None)).__name__ for module in routed})


def watch_routing(model: torch.nn.Module, tokens: int) -> None:
    """Have every router keep what it chose for the first ``tokens`` tokens of the last batch of at least so many.

    Routers run in Python only where no graph is replayed: for more tokens than the largest graph takes.
    """
    for router in _routers(model):
        router.select_experts = _remembering(router, tokens)


def distinct_experts(model: torch.nn.Module) -> float | None:
    """How many experts these tokens were sent to, mean over layers; ``None`` if no router could be watched."""
    counts = [len(router.watched_ids.unique()) for router in _routers(model) if router.watched_ids is not None]
    return sum(counts) / len(counts) if counts else None


def _routers(model: torch.nn.Module) -> list[Any]:
    owners = (module for module in model.modules() if hasattr(module, "router"))
    routers = {id(owner.router): owner.router for owner in owners}
    return [router for router in routers.values() if hasattr(router, "select_experts")]


def _remembering(router: Any, tokens: int) -> Any:
    select_experts, router.watched_ids = router.select_experts, None

    def select(*args: Any, **kwargs: Any) -> Any:
        weights_TK, ids_TK = select_experts(*args, **kwargs)
        if len(ids_TK) >= tokens:
            router.watched_ids = ids_TK[:tokens].clone()
        return weights_TK, ids_TK

    return select
