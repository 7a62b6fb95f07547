"""What is done to a model inside the engine's process: weights filled at random, counted, its routing watched.

These functions are handed to ``LLM.apply_model`` and ``LLM.collective_rpc``.
"""

from __future__ import annotations

from typing import Any

import torch

NIBBLE_DEVIATION = 4.6
"""Standard deviation of a nibble whose bits are random."""

SMALL_BYTES = 2**20


@torch.inference_mode()
def fill_at_random(model: Any, seed: int) -> None:
    """Give a loaded model the weights of an untrained one, in whatever layout its kernels want them.

    vLLM's own random weights leave packed words as the memory was, and are so small that routers tell experts apart
    by rounding alone. Here all bits of packed words are random, scales and plain weights keep the size of hidden
    states, norms are 1. In place, so that captured graphs see it.

    Args:
        model: a vLLM model after loading.
        seed: every parameter has its own, derived from it.
    """
    deviation = model.config.hidden_size**-0.5
    for number, (name, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator(parameter.device).manual_seed(seed + number)
        if name.endswith("weight_packed"):
            least, most = torch.iinfo(parameter.dtype).min, torch.iinfo(parameter.dtype).max
            parameter.random_(least, most + 1, generator=generator)
        elif not parameter.is_floating_point():
            assert parameter.nbytes < SMALL_BYTES, f"{name} holds weights that were not filled"
        elif name.endswith("scale"):
            typical = deviation / NIBBLE_DEVIATION
            parameter.uniform_(0.5 * typical, 1.5 * typical, generator=generator)
        elif "norm" in name:
            parameter.fill_(1)
        else:
            # embeddings as large as hidden states are after a norm, lest all tokens look alike after a few layers
            parameter.normal_(0, 1 if "embed_tokens" in name else deviation, generator=generator)


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters, each storage once."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sum(storages.values())


def loading_bytes(worker: Any) -> int:
    """vLLM's own figure: what its device held more of after the model was loaded than before.

    On a CPU it is the memory of the whole machine and says nothing.
    """
    return int(worker.model_runner.model_memory_usage)


def expert_methods(model: torch.nn.Module) -> list[str]:
    """Class names of what runs the routed experts."""
    routed = (module for name, module in model.named_modules() if name.endswith("routed_experts"))
    return sorted({type(getattr(module, "quant_method", None)).__name__ for module in routed})


def watch_routing(model: torch.nn.Module) -> None:
    """Have every router keep the experts that it chose last.

    Routers run in Python only where no graph is replayed: for more tokens than the largest graph takes.
    """
    for router in _routers(model):
        router.select_experts = _remembering(router)


def distinct_experts(model: torch.nn.Module, tokens: int) -> float | None:
    """Experts that the first ``tokens`` tokens of the last batch were sent to, mean over layers.

    ``None`` if no router ran where it can be watched.
    """
    seen = [router.last_ids for router in _routers(model) if router.last_ids is not None]
    if not seen:
        return None
    return sum(len(ids_TK[:tokens].unique()) for ids_TK in seen) / len(seen)


def _routers(model: torch.nn.Module) -> list[Any]:
    owners = (module for module in model.modules() if hasattr(module, "router"))
    routers = {id(owner.router): owner.router for owner in owners}
    return [router for router in routers.values() if hasattr(router, "select_experts")]


def _remembering(router: Any) -> Any:
    select_experts, router.last_ids = router.select_experts, None

    def select(*args: Any, **kwargs: Any) -> Any:
        weights, ids_TK = select_experts(*args, **kwargs)
        router.last_ids = ids_TK.clone()
        return weights, ids_TK

    return select
