"""Options of text that a model writes itself."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from moe_coverage_plugin.options.base import Options


class SamplingOptions(Options):
    """How a model writes its own calibration text."""

    model_config = ConfigDict(frozen=True)

    samples: int = Field(default=512, ge=1)
    """Windows of ``length`` tokens that the kept documents must fill."""

    length: int = Field(default=2048, ge=16)
    """Most tokens of a document, and tokens of a window; at most the model's context."""

    form: Literal["auto", "chat", "text"] = "auto"
    """Whether documents are chats, of which the model writes both turns through its chat template, or plain text.

    ``auto``: chats if the tokenizer has a chat template.
    """

    temperature: float = Field(default=1.0, gt=0)
    """Divisor of the logits; 1 draws from the model's own distribution."""

    seed: int = Field(default=0, ge=0)
    """Seed of the draws."""

    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """Engine that generates; ``auto``: vLLM if it is installed here."""

    batch_size: int = Field(default=64, ge=1)
    """Documents at a time with the engine transformers; vLLM forms its own batches."""
