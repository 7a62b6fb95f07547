"""What an evaluation is run with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_coverage_plugin.manifest import CoverageError

BACKENDS = ("hf", "vllm")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class EvaluationOptions:
    """How tasks are run; whatever changes their numbers is stored with them.

    Args:
        backend: ``hf`` opens the checkpoint in transformers, weights decompressed; ``vllm`` in a vLLM engine.
        few_shot: worked examples in front of each document; the task's own number where not given.
        limit: take only the first so many documents of each task.
        batch_size: documents at a time with ``hf``; vLLM forms its own batches.
        seed: of whatever is drawn, which examples are shown among it.
        dtype: what is computed in; the checkpoint's where not given.
        device: where transformers computes; a GPU where there is one, if not given.
        tokenizer: directory of a tokenizer, if not the checkpoint's.
        model_args: arguments of vLLM's engine.
        trust_remote_code: run Python files of the checkpoint.
        run_unsafe_code: let tasks run the programs that the model writes.

    Raises:
        CoverageError: a value outside of its range.
    """

    backend: str = "hf"
    few_shot: int | None = None
    limit: int | None = None
    batch_size: int = 8
    seed: int = 1234
    dtype: str | None = None
    device: str | None = None
    tokenizer: str | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    run_unsafe_code: bool = False

    def __post_init__(self) -> None:
        for name, known in (("backend", BACKENDS), ("dtype", (None, *DTYPES))):
            if getattr(self, name) not in known:
                raise CoverageError(f"{name} is {getattr(self, name)!r}, not one of {', '.join(filter(None, known))}")
        for name, least in (("few_shot", 0), ("limit", 1), ("batch_size", 1), ("seed", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise CoverageError(f"{name} is {value}, at least {least} is right")
        if self.model_args and self.backend != "vllm":
            raise CoverageError("model_args are arguments of vLLM's engine: leave them out, or use the backend vllm")
        if self.device is not None and self.backend != "hf":
            raise CoverageError("device is for the backend hf: with vllm, set CUDA_VISIBLE_DEVICES")
