"""Options of fine-tuning."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from moe_coverage_plugin.options.base import Options


class RecoveryOptions(Options):
    """How a pruned model is fine-tuned; the defaults are the paper's where the paper names them."""

    model_config = ConfigDict(frozen=True)

    mode: Literal["all", "router"] = "all"
    """Whether to train experts and routers, or routers alone, against the logits of the unpruned model."""

    expert_rank: int = Field(default=32, ge=1)
    """Rank of DoRA on every projection of every expert."""

    router_rank: int = Field(default=4, ge=1)
    """Rank of the low-rank sum on routers."""

    expert_lr: float = Field(default=1e-4, ge=0)
    """Peak learning rate of experts, of AdamW."""

    router_lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate of routers, of AdamW."""

    scaling: float = Field(default=2.0, gt=0)
    """Factor of the low-rank products, ``lora_alpha / r``."""

    warmup: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the steps over which learning rates rise from zero; they fall to zero over the others."""

    clip: float = Field(default=0.5, gt=0)
    """Largest norm of the gradient of all adapters."""

    balance: float = Field(default=0.0, ge=0)
    """Weight of the auxiliary loss that evens out the load of the kept experts."""

    distill: float = Field(default=1.0, gt=0, le=1)
    """Share of the loss that is divergence from the logits of the teacher, if there is one.

    The rest is next-token loss.
    """

    temperature: float = Field(default=1.0, gt=0)
    """Divisor of the logits of both models in that divergence."""

    epochs: float = Field(default=1.0, gt=0)
    """Number of passes over the text, if ``steps`` is not given."""

    steps: int | None = Field(default=None, ge=1)
    """Steps of the optimizer, instead of epochs."""

    batch_size: int = Field(default=8, ge=1)
    """Windows of text that each rank processes at once."""

    accumulation: int = Field(default=1, ge=1)
    """Batches of a step on each rank, whose gradients are summed."""

    sequence_length: int = Field(default=512, ge=2)
    """Tokens of a window."""

    held_out: float = Field(default=0.05, gt=0, lt=1)
    """Fraction of the windows for the held-out loss, if no other text is given for it."""

    evaluate_every: int = Field(default=100, ge=1)
    """Steps between two points of the loss curve."""

    save_every: int = Field(default=100, ge=1)
    """Steps between two states to resume from."""

    checkpointing: bool = False
    """Whether to compute activations a second time in the backward pass instead of keeping them."""

    dtype: Literal["bfloat16", "float32"] | None = None
    """Data type of the frozen weights and of the result; by default, the checkpoint's."""

    nf4: bool = False
    """Whether to keep the frozen weights of a 16-bit checkpoint's experts in the NF4 of bitsandbytes.

    They take a quarter of the memory, and experts compute one after the other. The result has the rounded weights with
    the adapters merged into them.
    """

    seed: int = Field(default=0, ge=0, lt=2**20)
    """Seed of the initial values of adapters and of the order of the windows."""
