"""How a pruned model is fine-tuned."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_coverage_plugin.manifest import CoverageError


class RecoveryOptions(BaseModel):
    """Settings of a fine-tuning; the defaults are the paper's where it names them.

    Attributes:
        mode: train experts and routers (``all``), or routers alone, against the logits of the unpruned model.
        expert_rank, router_rank: ranks of DoRA on every projection of every expert, and of what routers gain.
        expert_lr, router_lr: peak learning rates of AdamW.
        scaling: factor of the low-rank products (``lora_alpha / r``).
        warmup: fraction of the steps over which the rates rise from zero; they fall to zero over the others.
        clip: largest norm of the gradient of all adapters.
        balance: weight of the auxiliary loss that evens out the load of the experts that are left; 0: none.
        distill: with a teacher, the share of the loss that is divergence from its logits; the rest is next-token loss.
        temperature: divides both models' logits in that divergence.
        epochs: times that the text is gone through, where ``steps`` is not given.
        steps: steps of the optimizer.
        batch_size: windows that a rank takes through the model at once.
        accumulation: how many such batches make a step, on every rank.
        sequence_length: tokens of a window.
        held_out: fraction of the windows that the loss curve is measured on, where no other text is given for it.
        evaluate_every, save_every: steps between two points of the loss curve, and two states to resume from.
        checkpointing: compute activations a second time in the backward pass instead of keeping them.
        dtype: of the frozen weights and the result; the checkpoint's own where not given.
        nf4: hold the frozen weights of a 16-bit checkpoint's experts in the NF4 of bitsandbytes, a quarter of the
            memory, one expert computing after the other. The result has them rounded so, and what was learnt on top.
        seed: of the adapters' start and of the order of the text.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["all", "router"] = "all"
    expert_rank: int = Field(default=32, ge=1)
    router_rank: int = Field(default=4, ge=1)
    expert_lr: float = Field(default=1e-4, ge=0, allow_inf_nan=False)
    router_lr: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    scaling: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    warmup: float = Field(default=0.1, ge=0, lt=1)
    clip: float = Field(default=0.5, gt=0, allow_inf_nan=False)
    balance: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    distill: float = Field(default=1.0, gt=0, le=1)
    temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    epochs: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    steps: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=8, ge=1)
    accumulation: int = Field(default=1, ge=1)
    sequence_length: int = Field(default=512, ge=2)
    held_out: float = Field(default=0.05, gt=0, lt=1)
    evaluate_every: int = Field(default=100, ge=1)
    save_every: int = Field(default=100, ge=1)
    checkpointing: bool = False
    dtype: Literal["bfloat16", "float32"] | None = None
    nf4: bool = False
    seed: int = Field(default=0, ge=0, lt=2**20)

    @classmethod
    def checked(cls, **values: Any) -> RecoveryOptions:
        """The options, a value that is none told in one sentence.

        Raises:
            CoverageError: an unknown option, or a value that it does not take.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise CoverageError(f"option {name}={first['input']!r} of fine-tuning: {first['msg']}") from error
