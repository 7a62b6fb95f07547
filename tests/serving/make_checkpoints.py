"""Makes the checkpoints that the serving tests open, and what transformers answers to them.

Runs in the compressing environment; the serving tests run in another, without the toolkit.

    python tests/serving/make_checkpoints.py [DIRECTORY]
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from llmcompressor import oneshot
from safetensors.torch import save_file

from moe_coverage_plugin import load, recipe_path

from tiny import VOCAB, save_model, token_batches

PROMPT_TOKENS = 64

# name -> (recipe, layout, family, dtype). One for every recipe that comes with the package, and every layout.
CHECKPOINTS: Mapping[str, tuple[str, str, str, torch.dtype]] = {
    "ragged_fp32": ("coverage_p50", "ragged", "qwen3_moe", torch.float32),
    "ragged_bf16": ("coverage_p50", "ragged", "qwen3_moe", torch.bfloat16),
    "ragged_w4a16": ("coverage_p25_q4", "ragged", "qwen3_moe", torch.float32),
    "ragged_gptq": ("coverage_p25_gptq", "ragged", "qwen3_moe", torch.float32),
    "ragged_w4a16_a64": ("coverage_p25_q4_a64", "ragged", "qwen3_moe", torch.float32),
    "ragged_gptq_a64": ("coverage_p25_gptq_a64", "ragged", "qwen3_moe", torch.float32),
    "ragged_shared_w4a16": ("coverage_p25_q4", "ragged", "qwen2_moe", torch.float32),
    "padded_fp32": ("coverage_p50", "padded", "qwen3_moe", torch.float32),
    "padded_w4a16": ("coverage_p25_q4", "padded", "qwen3_moe", torch.float32),
    "uniform_fp32": ("coverage_p50", "uniform", "qwen3_moe", torch.float32),
}


def make(name: str, directory: Path, workspace: Path) -> None:
    """Write one checkpoint and beside it ``expected.safetensors``: a prompt and its log-probabilities."""
    recipe_name, layout, family, dtype = CHECKPOINTS[name]
    source = workspace / f"{family}_{dtype}"
    if not source.exists():
        save_model(source, family, dtype)
    recipe: dict[str, Any] = yaml.safe_load(Path(recipe_path(recipe_name)).read_text())
    recipe["prune_stage"]["prune_modifiers"]["ChannelPruningModifier"]["layout"] = layout
    output = directory / name
    shutil.rmtree(output, ignore_errors=True)
    oneshot(
        model=str(source),
        dataset=token_batches(),
        recipe=yaml.safe_dump(recipe, sort_keys=False),
        output_dir=str(output),
    )
    save_file(expected(output), output / "expected.safetensors")


@torch.no_grad()
def expected(checkpoint: Path) -> dict[str, torch.Tensor]:
    """``prompt_ids`` int64 ``[64]`` and the log-probability of each next token, float32 ``[63]``."""
    prompt_ids = torch.randint(2, VOCAB, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(7))
    logits = load(checkpoint)(prompt_ids[None]).logits[0, :-1]
    chosen = logits.float().log_softmax(-1).gather(-1, prompt_ids[1:, None]).squeeze(-1)
    return {"prompt_ids": prompt_ids, "prompt_logprobs": chosen}


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".artifacts").absolute()
    for checkpoint_name in CHECKPOINTS:
        make(checkpoint_name, target, target / "sources")
