"""One layer of experts of published models at full width: pruned, quantized, opened in a real vLLM engine.

Run by hand, on a machine with a card, in each of the two environments in turn; see --help. ``--scale 4`` is for a try
on a small machine.

    PYTHONPATH=. python -m tests.true_shapes write DIRECTORY     where llm-compressor is
    PYTHONPATH=. python -m tests.true_shapes serve DIRECTORY           where vLLM is

Both print one JSON object a shape. ``serve`` leaves with 1 if an engine failed, or differs from transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.serving.agreement import agreement, stored_bytes_of_experts
from tests.serving.engine import expected_logprobs, open_engine
from tests.serving.ranks import generate

SPARSITY, BLOCK = 0.4, 128
MEDIAN_BFLOAT16 = 0.02
WINDOW_TOKENS = 128
# what a smaller machine divides; vLLM's kernels for CPUs insist on the heads' own sizes
SCALED = (
    *("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "num_experts", "n_routed_experts"),
)
# random weights keep the size of hidden states that tiny models have, of which it is known how far bfloat16 differs
RANGE_AT_WIDTH = (0.02, 128)
# with W4A16, groups of 128 divide no layer of 10944 channels
DENSE_DOWN = r"re:.*layers\.0\.mlp\.down_proj$"
REPORT = '{"shape"'


@dataclass(frozen=True)
class Shape:
    """A published model, of which only layers up to the first with experts are made, and a small vocabulary."""

    family: str
    config: dict[str, Any]

    @property
    def dense_first(self) -> bool:
        return self.config.get("first_k_dense_replace", 0) > 0

    def scaled(self, scale: int) -> dict[str, Any]:
        config = {key: max(1, value // scale) if key in SCALED else value for key, value in self.config.items()}
        spread, width = RANGE_AT_WIDTH
        return config | {
            "num_hidden_layers": 2 if self.dense_first else 1,
            "initializer_range": spread * (width / config["hidden_size"]) ** 0.5,
        }


YARN_OF_DEEPSEEK = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
}
SHAPES = {
    "qwen1.5-moe-a2.7b": Shape(
        "qwen2_moe",
        {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632}
        | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "norm_topk_prob": False}
        | {"shared_expert_intermediate_size": 5632, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "deepseek-v2-lite": Shape(
        "deepseek_v2",
        {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944}
        | {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
        | {"first_k_dense_replace": 1, "rope_parameters": YARN_OF_DEEPSEEK},
    ),
    "qwen3-30b-a3b": Shape(
        "qwen3_moe",
        {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
        | {"head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "glm-4.5-air": Shape(
        "glm4_moe",
        {"hidden_size": 4096, "num_attention_heads": 96, "num_key_value_heads": 8, "intermediate_size": 10944}
        | {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1}
        | {"head_dim": 128, "first_k_dense_replace": 1, "attention_bias": True, "norm_topk_prob": True}
        | {"num_nextn_predict_layers": 0}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    ),
}


def write(directory: Path, name: str, scale: int, windows: int) -> dict[str, Any]:
    """Make, prune, quantize and save one shape, and beside it what transformers answers; what became of it."""
    # the other environment has no toolkit
    from llmcompressor import oneshot
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from moe_coverage_plugin import Manifest, recommended_recipe
    from tests.serving.make_checkpoints import expected
    from tests.tiny import CONFIGS, add_tokenizer, diversify, token_batches

    start, shape = time.perf_counter(), SHAPES[name]
    source, output = directory / "sources" / name, directory / name
    shutil.rmtree(output, ignore_errors=True)

    config = CONFIGS[shape.family](**shape.scaled(scale), dtype="bfloat16")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    diversify(model)
    # the toolkit looks at what the model came from
    config.architectures = [type(model).__name__]
    config.save_pretrained(add_tokenizer(source))
    model.name_or_path = model.config._name_or_path = str(source)
    made = time.perf_counter()
    before = sum(parameter.nbytes for parameter in model.parameters())

    recipe = recommended_recipe(SPARSITY, BLOCK // scale, gptq=False, ignore=[DENSE_DOWN] if shape.dense_first else [])
    oneshot(
        model=model,
        dataset=token_batches(windows, WINDOW_TOKENS),
        recipe=recipe,
        batch_size=4,
        moe_calibrate_all_experts=False,
        output_dir=str(output),
    )
    del model
    compressed = time.perf_counter()
    save_file(expected(output, device), directory / f"{name}.expected.safetensors")

    manifest = Manifest.from_checkpoint(output)
    assert manifest is not None
    (widths,) = manifest.widths.values()
    if not 0 < widths.count(0) <= len(widths) - config.num_experts_per_tok:
        raise AssertionError(f"{widths.count(0)} of {len(widths)} experts died, some must and enough must live")
    return {
        "shape": name,
        "scale": scale,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "widths": {"min": min(widths), "mean": sum(widths) / len(widths), "max": max(widths)},
        "experts": len(widths),
        "removed_experts": widths.count(0),
        "bytes_before": before,
        "bytes_after": sum(file.stat().st_size for file in output.glob("*.safetensors")),
        "seconds": {
            "make": round(made - start, 1),
            "compress": round(compressed - made, 1),
            "expect": round(time.perf_counter() - compressed, 1),
        },
    }


def serve(directory: Path, names: list[str]) -> bool:
    """Open every checkpoint in a process of its own, on a card all at once; whether all agree with transformers."""
    at_once = len(names) if torch.cuda.is_available() else 1
    agree = True
    for number in range(0, len(names), at_once):
        started = {name: _start_apart(directory / name) for name in names[number : number + at_once]}
        for name, process in started.items():
            report = _report_of(process, directory / f"{name}.log", name)
            print(json.dumps(report), flush=True)
            agree = agree and report.get("agrees", False)
    return agree


def _start_apart(checkpoint: Path) -> subprocess.Popen[bytes]:
    # the engine runs in that process itself, where its parameters can be looked at
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ
    command = [sys.executable, "-m", "tests.true_shapes", "open", str(checkpoint)]
    with checkpoint.with_name(f"{checkpoint.name}.log").open("wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _report_of(process: subprocess.Popen[bytes], log: Path, name: str) -> dict[str, Any]:
    status = process.wait()
    lines = log.read_text(errors="replace").splitlines()
    reports = [json.loads(line) for line in lines if line.startswith(REPORT)]
    last = next((line for line in reversed(lines) if line.strip()), "")
    return reports[-1] if reports else {"shape": name, "error": f"exit status {status}: {last}", "log": str(log)}


def open_one(checkpoint: Path) -> dict[str, Any]:
    """What a real engine makes of one checkpoint, compared with transformers, or its error."""
    start = time.perf_counter()
    try:
        llm = open_engine(checkpoint, **_engine_options(len(expected_logprobs(checkpoint)[0])))
        opened = time.perf_counter()
        return {"shape": checkpoint.name} | _compare(checkpoint, llm) | {"start_seconds": round(opened - start, 1)}
    except Exception as error:
        return {"shape": checkpoint.name, "error": f"{type(error).__name__}: {error}"}


def _engine_options(prompt_tokens: int) -> dict[str, Any]:
    options: dict[str, Any] = {"max_model_len": 256, "worker_extension_cls": "tests.serving.ranks.RankProbe"}
    if torch.cuda.is_available():
        options |= {
            "enforce_eager": False,
            # the prompt replays a graph, too
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, prompt_tokens]},
            # measuring free memory would count what engines beside this one take
            "kv_cache_memory_bytes": 2**28,
            "gpu_memory_utilization": 0.05,
        }
    return options


def _compare(checkpoint: Path, llm: Any) -> dict[str, Any]:
    from benchmarks.serving.parameters import expert_methods

    prompt_ids = expected_logprobs(checkpoint)[0]
    found = generate(llm, prompt_ids)
    prompt = agreement(checkpoint, found["prompt_logprobs"])
    # tokens decoded one by one, against the same tokens as a prompt
    whole = generate(llm, prompt_ids + found["tokens"])["prompt_logprobs"]
    decoded = (torch.tensor(found["logprobs"]) - torch.tensor(whole[len(prompt_ids) - 1 :])).abs()
    ((held, _),) = llm.collective_rpc("bytes_held")
    return {
        "agrees": prompt["agrees"] and decoded.median().item() <= MEDIAN_BFLOAT16,
        "prompt": prompt,
        "decoding_from_prompt": {"median": decoded.median().item(), "max": decoded.max().item()},
        "experts_run_by": llm.apply_model(expert_methods)[0],
        "expert_bytes_held": held,
        "expert_bytes_stored": stored_bytes_of_experts(checkpoint),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    for task in ("write", "serve"):
        arguments = tasks.add_parser(task)
        arguments.add_argument("directory", type=Path)
        arguments.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
        if task == "write":
            arguments.add_argument("--scale", type=int, default=1, help="divides widths, heads, numbers of experts")
            arguments.add_argument(
                "--windows", type=int, default=16, help=f"of {WINDOW_TOKENS} tokens to calibrate on"
            )
    tasks.add_parser("open", help="what serve starts for every checkpoint").add_argument("checkpoint", type=Path)
    args = parser.parse_args()

    if args.task == "write":
        for name in args.shapes:
            print(json.dumps(write(args.directory, name, args.scale, args.windows)), flush=True)
    elif args.task == "serve":
        sys.exit(0 if serve(args.directory, args.shapes) else 1)
    else:
        print(json.dumps(open_one(args.checkpoint)), flush=True)


if __name__ == "__main__":
    main()
