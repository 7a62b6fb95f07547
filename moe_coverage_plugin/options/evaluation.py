"""Options of an evaluation."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options.base import Options


class EvaluationOptions(Options):
    """How tasks are run; settings that change the numbers are stored with the results."""

    model_config = ConfigDict(frozen=True)

    backend: Literal["hf", "vllm"] = "hf"
    """Engine that opens the checkpoint: transformers (hf), with weights decompressed, or vLLM."""

    few_shot: int | None = Field(default=None, ge=0)
    """Worked examples in front of each document; by default, the task's own number."""

    limit: int | None = Field(default=None, ge=1)
    """Number of documents of each task, from the first; by default, all."""

    batch_size: int = Field(default=8, ge=1)
    """Documents at a time with the backend hf; vLLM forms its own batches."""

    seed: int = Field(default=1234, ge=0)
    """Seed of random choices, such as that of the worked examples."""

    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Data type to compute in; by default, the checkpoint's."""

    device: str | None = None
    """Device of the backend hf; by default, a GPU if there is one."""

    tokenizer: str | None = None
    """Directory of the tokenizer; by default, the checkpoint."""

    model_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM's engine."""

    trust_remote_code: bool = False
    """Whether to run Python files of the checkpoint."""

    run_unsafe_code: bool = False
    """Whether to let tasks run the programs that the model writes."""

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if self.model_args and self.backend != "vllm":
            raise CoverageError("model_args are arguments of vLLM's engine: leave them out, or use the backend vllm")
        if self.device is not None and self.backend != "hf":
            raise CoverageError("device is for the backend hf: with vllm, set CUDA_VISIBLE_DEVICES")
        return self
