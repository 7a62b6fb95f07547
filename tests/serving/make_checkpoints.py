"""Makes the checkpoints that the serving tests open, and the log-probabilities of transformers for them.

Runs in the compressing environment; the serving tests run in another, without the toolkit.

    PYTHONPATH=. python tests/serving/make_checkpoints.py [DIRECTORY]
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from llmcompressor import oneshot
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_coverage_plugin import load, recipe_path
from moe_coverage_plugin.checkpoint import saving
from moe_coverage_plugin.expert_scheme import PROJECTIONS
from tests.checkpoint.bases import make_bases
from tests.tiny import GROUP_LIMITED, LISTED, VOCAB, add_tokenizer, save_model, token_batches

PROMPT_TOKENS = 64
DRAWS = 8
WINDOW_TOKENS = 4
Modifiers = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Spec:
    """How to make a checkpoint: a recipe of the package on a tiny model, with fields of both changed.

    ``before`` are modifiers of llm-compressor that run before the recipe. ``adapter`` are options of adapters of peft,
    on experts and attention, that are merged into the checkpoint.
    """

    recipe: str
    family: str = "qwen3_moe"
    dtype: torch.dtype = torch.float32
    layout: str = "ragged"
    changes: Modifiers = field(default_factory=dict)
    before: Modifiers = field(default_factory=dict)
    adapter: dict[str, Any] | None = None
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return "_".join([self.family, str(self.dtype), *(f"{name}_{value}" for name, value in self.config.items())])

    def modifiers(self) -> Modifiers:
        recipe = yaml.safe_load(Path(recipe_path(self.recipe)).read_text())["prune_stage"]["prune_modifiers"]
        recipe["ChannelPruningModifier"] |= {"layout": self.layout, "pictures": False}
        for name, fields in self.changes.items():
            recipe[name] |= fields
        return self.before | recipe


# blocks as wide as an expert leave only unpruned experts: all that are kept have one width
WHOLE_EXPERTS: Modifiers = {"AlignmentModifier": {"block_size": 512, "min_width": 512}}
QUANTIZED_NOWHERE: Modifiers = {"QuantizationModifier": {"ignore": ["re:.*"]}}
# sizes that three ranks divide, except for the experts' 512 channels
FOR_THREE_RANKS = {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 9 * 64}

# two fifths of the channels of every layer are removed, and the experts that would keep less than two blocks; nothing
# uses the importance of layers, which takes a fifth of the time
TWO_FIFTHS: Modifiers = {
    "AttributionModifier": {"layer_noise": None},
    "CoverageModifier": {"sparsity": 0.4, "inter_layer": "uniform"},
    "AlignmentModifier": {"min_width": 128},
}

FOUR_BITS_BY_CHANNEL = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}
BY_CHANNEL: Modifiers = {
    "QuantizationModifier": {"config_groups": {"group_0": {"targets": ["Linear"], "weights": FOUR_BITS_BY_CHANNEL}}}
}
ASYMMETRIC: Modifiers = {"QuantizationModifier": {"scheme": "W4A16_ASYM"}}
FLOAT8: Modifiers = {"QuantizationModifier": {"scheme": "FP8_DYNAMIC"}}
EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
FLOAT8_ATTENTION: Modifiers = {
    "QuantizationModifier": {
        "config_groups": {
            "attention": {
                "targets": ["re:.*self_attn.*_proj$"],
                "weights": EIGHT_BITS | {"strategy": "channel"},
                "input_activations": EIGHT_BITS | {"strategy": "token", "dynamic": True},
            },
            "experts": {
                "targets": ["re:.*experts.*_proj$"],
                "weights": FOUR_BITS_BY_CHANNEL | {"strategy": "group", "group_size": 64},
            },
        }
    }
}
BLOCKS_OF_64: Modifiers = {"AlignmentModifier": {"block_size": 64, "min_width": 128}}
# with one scale for each row, any width is possible
EXACT_WIDTHS: Modifiers = {"AlignmentModifier": {"block_size": 1, "min_width": 128}}


# recipes of the package, every layout, and families that name or route differently
CHECKPOINTS: Mapping[str, Spec] = {
    "ragged_fp32": Spec("coverage_p50"),
    "ragged_bf16": Spec("coverage_p50", dtype=torch.bfloat16),
    "ragged_whole_experts": Spec("coverage_p25_q4", changes=WHOLE_EXPERTS | QUANTIZED_NOWHERE),
    "ragged_w4a16": Spec("coverage_p25_q4"),
    "ragged_w4a16_a64": Spec("coverage_p25_q4_a64"),
    "ragged_gptq_a64": Spec("coverage_p25_gptq_a64"),
    "ragged_by_channel": Spec("coverage_p25_q4_a64", changes=BY_CHANNEL),
    "ragged_asymmetric": Spec("coverage_p25_q4", changes=ASYMMETRIC),
    "ragged_fp8": Spec("coverage_p25_q4", changes=TWO_FIFTHS | BLOCKS_OF_64 | FLOAT8),
    "ragged_fp8_exact": Spec("coverage_p25_q4", dtype=torch.bfloat16, changes=TWO_FIFTHS | EXACT_WIDTHS | FLOAT8),
    "ragged_float8_attention": Spec("coverage_p25_q4_a64", changes=TWO_FIFTHS | FLOAT8_ATTENTION),
    "ragged_after_reap": Spec("coverage_p25_q4", before={"REAPPruningModifier": {"sparsity": 0.25}}),
    "ragged_fisher_p50_w4a16": Spec("fisher_p50_q4"),
    "ragged_shared_w4a16": Spec("coverage_p25_q4", "qwen2_moe"),
    "ragged_shared_fp32": Spec("coverage_p25_q4_a64", "qwen2_moe", changes=TWO_FIFTHS | QUANTIZED_NOWHERE),
    "ragged_three_ranks": Spec("coverage_p25_q4_a64", config=FOR_THREE_RANKS),
    "ragged_mixtral": Spec("coverage_p25_q4_a64", "mixtral"),
    "ragged_glm4": Spec("coverage_p25_q4_a64", "glm4_moe"),
    "ragged_olmoe": Spec("coverage_p25_q4_a64", "olmoe", changes=TWO_FIFTHS),
    "ragged_deepseek": Spec("coverage_p25_q4_a64", LISTED, changes=TWO_FIFTHS),
    "ragged_deepseek_v2": Spec("coverage_p25_q4_a64", "deepseek_v2", changes=TWO_FIFTHS),
    "ragged_deepseek_v2_groups": Spec("coverage_p25_q4_a64", "deepseek_v2", changes=TWO_FIFTHS, config=GROUP_LIMITED),
    "ragged_deepseek_v3": Spec("coverage_p25_q4_a64", "deepseek_v3", changes=TWO_FIFTHS),
    "ragged_ernie": Spec("coverage_p25_q4_a64", "ernie4_5_moe", changes=TWO_FIFTHS),
    "ragged_minimax": Spec("coverage_p25_q4_a64", "minimax_m2", changes=TWO_FIFTHS),
    "ragged_qwen3_next": Spec("coverage_p25_q4_a64", "qwen3_next", torch.bfloat16, changes=TWO_FIFTHS),
    "ragged_granite": Spec("fisher_p50", "granitemoe", changes={"CoverageModifier": {"sparsity": 0.4}}),
    "ragged_granite_w4a16": Spec("fisher_p25_q4", "granitemoe", changes={"CoverageModifier": {"sparsity": 0.4}}),
    "ragged_gpt_oss": Spec("fisher_p50", "gpt_oss", changes={"CoverageModifier": {"sparsity": 0.4}}),
    "ragged_lora": Spec("coverage_p50", adapter={}),
    "ragged_dora_mixtral": Spec("coverage_p50", "mixtral", adapter={"use_dora": True}),
    "padded_fp32": Spec("coverage_p50", layout="padded"),
    "padded_w4a16": Spec("coverage_p25_q4", layout="padded"),
    "uniform_fp32": Spec("coverage_p50", layout="uniform"),
}


def make(name: str, directory: Path, workspace: Path) -> None:
    """Write one checkpoint and beside it ``NAME.expected.safetensors``: a prompt and its log-probabilities."""
    spec = CHECKPOINTS[name]
    source = workspace / spec.source
    if not source.exists():
        add_tokenizer(save_model(source, spec.family, spec.dtype, **spec.config))
    output = directory / name
    shutil.rmtree(output, ignore_errors=True)
    recipe = yaml.safe_dump({"prune_stage": {"prune_modifiers": spec.modifiers()}}, sort_keys=False)
    # llm-compressor does not load code from a path
    trusted = spec.family == LISTED
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True) if trusted else str(source)
    options: dict[str, Any] = {"batch_size": 4, "output_dir": str(output), "trust_remote_code_model": trusted}
    saved = oneshot(model=model, dataset=token_batches(), recipe=recipe, **options)
    if spec.adapter is not None:
        merge_adapter(output, spec.adapter)
    # engines quantize activations, which load() does not
    reference = as_engines_compute(saved) if _quantizes_activations(saved) else None
    # not in the directory, because engines load every safetensors file in it
    save_file(expected(output, model=reference), directory / f"{name}.expected.safetensors")


def merge_adapter(checkpoint: Path, options: dict[str, Any]) -> None:
    """Replace a 16-bit checkpoint by one with merged adapters of random values."""
    adapted = get_peft_model(load(checkpoint), LoraConfig(r=4, target_modules=["q_proj", *PROJECTIONS], **options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    merged = checkpoint.with_name(f"{checkpoint.name}_merged")
    adapted.merge_and_unload().save_pretrained(merged)
    shutil.rmtree(checkpoint)
    merged.rename(checkpoint)


def as_engines_compute(model: PreTrainedModel) -> PreTrainedModel:
    """A model in memory that quantizes activations token by token, also in its experts.

    Products of weights and their scales are not rounded to bfloat16.
    """
    for layer in _quantized_layers(model):
        # patch: tests-token-scales
        layer.forward = partial(_with_one_more_axis, layer.forward)
    return model.to(torch.float32)


def _with_one_more_axis(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return forward(x[None])[0] if x.ndim == 2 else forward(x)


def _quantized_layers(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if getattr(module, "quantization_scheme", None) is not None]


def _quantizes_activations(model: PreTrainedModel) -> bool:
    return any(layer.quantization_scheme.input_activations for layer in _quantized_layers(model))


def expected(checkpoint: Path, device: str = "cpu", model: PreTrainedModel | None = None) -> dict[str, torch.Tensor]:
    """``prompt_ids`` int64 ``[64]`` and the log-probability of each next token, float32 ``[63]``.

    ``float32`` and ``bfloat16`` are computed in these dtypes, the checkpoint's own first. ``bfloat16_shaken``,
    ``DRAWS`` of them, is computed in bfloat16 with other roundings of each layer, like another correct implementation.

    If activations are quantized, ``float32_of_windows`` ``[16, 3]`` is of each four tokens of the prompt alone: the
    last bit of one value may decide to which of two distant numbers it is rounded, and log-probabilities after it in a
    prompt then differ.

    Args:
        checkpoint: its directory.
        device: where to compute.
        model: the model to run; by default the checkpoint as ``load`` opens it.
    """
    prompt_ids = torch.randint(2, VOCAB, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(7))
    trusted = "auto_map" in (checkpoint / "config.json").read_text()
    model = (model or load(checkpoint, trust_remote_code=trusted)).to(device).eval()
    result = {"prompt_ids": prompt_ids}
    for dtype in sorted((torch.float32, torch.bfloat16), key=lambda dtype: dtype != model.dtype):
        name = str(dtype).removeprefix("torch.")
        result[name] = _logprobs(model.to(dtype), prompt_ids)
        if dtype == torch.float32 and _quantizes_activations(model):
            windows = prompt_ids.split(WINDOW_TOKENS)
            result[f"{name}_of_windows"] = torch.stack([_logprobs(model, window) for window in windows])
    model.to(torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    for layer in model.get_decoder().layers:
        layer.register_forward_hook(partial(_shake, generator))
    result["bfloat16_shaken"] = torch.stack([_logprobs(model, prompt_ids) for _ in range(DRAWS)])
    return result


def _shake(generator: torch.Generator, _: torch.nn.Module, __: Any, output: Any) -> Any:
    """Change hidden states by up to one unit of their last bit."""
    hidden, *others = output if isinstance(output, tuple) else (output,)
    noise = torch.rand(hidden.shape, generator=generator, device=hidden.device) * 2 - 1
    shaken = (hidden.float() * (1 + noise * torch.finfo(hidden.dtype).eps)).to(hidden.dtype)
    return (shaken, *others) if isinstance(output, tuple) else shaken


@torch.no_grad()
def _logprobs(model: PreTrainedModel, prompt_ids: torch.Tensor) -> torch.Tensor:
    logits = model(prompt_ids[None].to(model.device)).logits[0, :-1].cpu()
    return logits.float().log_softmax(-1).gather(-1, prompt_ids[1:, None]).squeeze(-1)


def make_half_written(directory: Path) -> None:
    """The directory of a process that is killed at the end of saving, renamed so that an engine can open it."""
    model = load(directory / "ragged_fp32")
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)  # threads do not survive a fork
        saving.write_entry = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        model.save_pretrained(directory / "half_written")
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the process was not killed while it saved"
    (left,) = directory.glob(".half_written.*.partial")
    left.rename(directory / "half_written")


def make_all(names: list[str], directory: Path, workspace: Path) -> None:
    """Make several checkpoints, from source models of their own."""
    for name in names:
        make(name, directory, workspace)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ".artifacts").absolute()
    shutil.rmtree(target, ignore_errors=True)
    torch.set_num_threads(1)  # two processes on two cores
    other = get_context("fork").Process(
        target=make_all, args=(list(CHECKPOINTS)[1::2], target, target / "other_sources")
    )
    other.start()
    make_all(list(CHECKPOINTS)[::2], target, target / "sources")
    make_bases(target / "mutations")
    other.join()
    if other.exitcode:
        sys.exit("a checkpoint could not be made, see above")
    make_half_written(target)
