"""Text in models that also see: pruned, quantized, opened in a real vLLM engine.

vLLM imports their processors of images and videos even where it is to read text alone, so both environments need
torchvision. Run by hand in each of the two environments in turn; see --help.

    PYTHONPATH=. python -m tests.seeing_models write DIRECTORY     where llm-compressor is
    PYTHONPATH=. python -m tests.seeing_models serve DIRECTORY           where vLLM is; on a card with graphs

Both print one JSON object a model. ``serve`` leaves with 1 if an engine failed, or differs from transformers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.serving.agreement import TIMES_ROUNDING, agreement, stored_bytes_of_experts
from tests.serving.engine import expected_logprobs
from tests.serving.ranks import CROWD, finish, start

SPARSITY, BLOCK, WIDTH = 0.4, 64, 256
# after the words of the tokenizer, in the order of their numbers in the config
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
MARK_FIELDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
PATCH = 16
SIDES = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (8 * PATCH) ** 2}


@dataclass(frozen=True)
class Seeing:
    """A tiny model with a tower for images, and how it is stored.

    Attributes:
        text_alone: opened by the class for its text alone, as ``oneshot(model="path")`` does.
    """

    family: str
    scheme: str | None = None
    text_alone: bool = False


MODELS = {
    "qwen3_vl_moe": Seeing("qwen3_vl_moe"),
    "qwen3_vl_moe_w4a16": Seeing("qwen3_vl_moe", "W4A16"),
    "qwen3_5_moe": Seeing("qwen3_5_moe"),
    "qwen3_5_moe_w4a16": Seeing("qwen3_5_moe", "W4A16"),
    "qwen3_5_moe_text_w4a16": Seeing("qwen3_5_moe", "W4A16", text_alone=True),
}


def write(directory: Path, name: str) -> dict[str, Any]:
    """Make, prune, quantize and save one model, and beside it what transformers answers; what became of it."""
    # the other environment has no toolkit
    from llmcompressor import oneshot
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText

    from moe_coverage_plugin import Manifest, recommended_recipe
    from tests.serving.make_checkpoints import expected
    from tests.tiny import token_batches

    seeing = MODELS[name]
    source, output = directory / "sources" / seeing.family, directory / name
    if not source.exists():
        _make_source(source, seeing.family)
    shutil.rmtree(output, ignore_errors=True)
    oneshot(
        model=str(source) if seeing.text_alone else AutoModelForImageTextToText.from_pretrained(source),
        dataset=token_batches(),
        recipe=recommended_recipe(SPARSITY, BLOCK, scheme=seeing.scheme, ignore=["re:.*visual.*"]),
        batch_size=4,
        output_dir=str(output),
    )
    save_file(expected(output), directory / f"{name}.expected.safetensors")

    manifest = Manifest.from_checkpoint(output)
    assert manifest is not None
    if not manifest.removed_experts:
        raise AssertionError("no expert died, and some must")
    return {
        "model": name,
        "architectures": json.loads((output / "config.json").read_text())["architectures"],
        "widths": manifest.widths,
        "bytes": sum(file.stat().st_size for file in output.glob("*.safetensors")),
    }


def _make_source(directory: Path, family: str) -> None:
    from transformers import (
        AutoModelForImageTextToText,
        PreTrainedTokenizerFast,
        Qwen2VLImageProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    from tests.tiny import VOCAB, add_tokenizer, diversify, seeing_config

    # engines read how routers normalize, which the class of one family in transformers does without
    config = seeing_config(family, moe_intermediate_size=WIDTH, vocab_size=VOCAB + 64, norm_topk_prob=True)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    diversify(model)
    model.save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(add_tokenizer(directory))
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    numbers = [getattr(model.config, field) for field in MARK_FIELDS]
    assert tokenizer.convert_tokens_to_ids(list(MARKS)) == numbers, "marks follow the words"
    seen = {"patch_size": PATCH, "size": SIDES}
    images, videos = Qwen2VLImageProcessor(**seen), Qwen3VLVideoProcessor(**seen)
    Qwen3VLProcessor(images, tokenizer, videos).save_pretrained(directory)


def serve(directory: Path, names: list[str]) -> bool:
    """Open every checkpoint in a process of its own, on a card all at once; whether all agree with transformers."""
    agree = True
    with ThreadPoolExecutor(len(names) if torch.cuda.is_available() else 1) as pool:
        for name, answer in zip(names, pool.map(_answer, (directory / name for name in names)), strict=True):
            print(json.dumps({"model": name} | answer), flush=True)
            agree = agree and answer.get("agrees", False)
    return agree


def _answer(checkpoint: Path) -> dict[str, Any]:
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    try:
        [found] = finish(start(checkpoint, _engine_options(len(expected_logprobs(checkpoint)[0])), **environment))
    except AssertionError as error:
        log = checkpoint.with_name(f"{checkpoint.name}.log")
        log.write_text(str(error))
        lines = str(error).splitlines()
        last = max((number for number, line in enumerate(lines) if "Error: " in line), default=-1)
        # what some errors are about is in the line after
        return {"error": " ".join(line.strip() for line in lines[last:][:2]), "log": str(log)}
    answer, ((held, _),) = found["output"], found["bytes_held"]
    prompts = {"prompt": answer["prompt_logprobs"], "in_crowd": answer.get("logprobs_in_crowd")}
    compared = {key: agreement(checkpoint, logprobs) for key, logprobs in prompts.items() if logprobs is not None}
    # tokens decoded one by one, against the same tokens as a prompt: other kernels, which round otherwise
    decoded = (torch.tensor(answer["logprobs"]) - torch.tensor(answer["logprobs_as_prompt"])).abs().median().item()
    most = TIMES_ROUNDING * compared["prompt"]["of_transformers"]["median"]
    near = all(each["agrees"] for each in compared.values()) and decoded <= most
    stored = stored_bytes_of_experts(checkpoint)
    return {
        "median_difference": compared["prompt"]["error"]["median"],
        "agrees": near and held == stored,
        **compared,
        "decoding_from_prompt_median": decoded,
        "expert_bytes_held": held,
        "expert_bytes_stored": stored,
    }


def _engine_options(prompt_tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {"language_model_only": True}
    if torch.cuda.is_available():
        options |= {
            "enforce_eager": False,
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, prompt_tokens]},
            "max_num_seqs": CROWD,
            # several engines share the card
            "gpu_memory_utilization": 0.05,
            "kv_cache_memory_bytes": 2**28,
            # of gated delta rules: those of flashinfer would be compiled first
            "gdn_prefill_backend": "triton",
        }
    return options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("write", "serve"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    # engines start in the repository
    directory = args.directory.absolute()

    if args.task == "serve":
        sys.exit(0 if serve(directory, args.models) else 1)
    for name in args.models:
        print(json.dumps(write(directory, name)), flush=True)


if __name__ == "__main__":
    main()
