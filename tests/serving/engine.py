"""Opens checkpoints in a real vLLM engine: in the test's process, or as a program in a process of its own.

python engine.py CHECKPOINTS.json    prints one JSON object a checkpoint: its log-probabilities or its error
"""

from __future__ import annotations

import gc
import json
import os
import sys
from functools import cache
from importlib import import_module
from inspect import unwrap
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

REPOSITORY = Path(__file__).parents[2]
ARTIFACTS = Path(os.environ.get("MOE_COVERAGE_ARTIFACTS", REPOSITORY / ".artifacts")).absolute()

# Prompts are token ids, so that checkpoints need no tokenizer. One process unless a test asks for more.
OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "disable_log_stats": True,
    "distributed_executor_backend": "uni",
    # a cache of 1 GiB takes half a second to fill with zeros
    "kv_cache_memory_bytes": 2**26,
}


def checkpoint_path(name: str, file: str = "config.json") -> Path:
    """Directory of a checkpoint made beforehand, with this file in it.

    Raises:
        FileNotFoundError: a failure, not a skip, with what to do.
    """
    path = ARTIFACTS / name
    if not (path / file).is_file():
        raise FileNotFoundError(f"{path} is missing: run make_checkpoints.py beside this file, where llmcompressor is")
    return path


def checkpoint_dtype(path: Path) -> str:
    """The dtype of a checkpoint, which engines must be given: vLLM narrows float32 by default."""
    return json.loads((path / "config.json").read_text())["dtype"]


def has_own_code(path: Path) -> bool:
    """Whether code beside a checkpoint, which these tests have written themselves, must be trusted to open it."""
    return "auto_map" in json.loads((path / "config.json").read_text())


def has_latent_attention(path: Path) -> bool:
    return json.loads((path / "config.json").read_text()).get("kv_lora_rank") is not None


def expected_logprobs(path: Path, computed: str | None = None) -> tuple[list[int], Any]:
    """A prompt, and the log-probability of each next token as transformers computed it.

    The file is beside the directory, because vLLM loads every safetensors file in it.

    Args:
        computed: ``"float32"``, ``"bfloat16"`` or ``"bfloat16_shaken"``, of which there are several; by default the
            checkpoint's dtype.
    """
    with safe_open(path.with_name(f"{path.name}.expected.safetensors"), "pt") as file:
        return file.get_tensor("prompt_ids").tolist(), file.get_tensor(computed or checkpoint_dtype(path)).tolist()


def open_engine(path: Path, **options: Any) -> Any:
    """A real ``vllm.LLM`` on a checkpoint, in its dtype."""
    from vllm import LLM

    prepare_process()
    own = {"trust_remote_code": has_own_code(path), "dtype": checkpoint_dtype(path)}
    if has_latent_attention(path) and not torch.cuda.is_available() and own["dtype"] == "float32":
        # on processors with AMX vLLM prefers another backend, which takes 16-bit floats only
        own["attention_backend"] = "CPU_MLA"
    arguments: dict[str, Any] = OPTIONS | own | options
    if not torch.cuda.is_available():
        # vLLM collects garbage four times an engine, and need not look through what is older than the engine
        gc.collect()
        gc.freeze()
    return LLM(str(path), **arguments)


# what vLLM imports for the first engine on a CPU
IMPORTED_LATE = (
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.qwen2_moe",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)


@cache
def prepare_process() -> None:
    """Change what vLLM does for an engine that has a process of its own, and repeats for each of many in one.

    Forks of the process inherit it.
    """
    from vllm.model_executor.models import registry

    if torch.cuda.is_available():
        return
    for module in IMPORTED_LATE:
        import_module(module)
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.engine import core
    from vllm.v1.sample import sampler
    from vllm.v1.worker import gpu_model_runner, gpu_worker

    # a process for each model, which keeps CUDA out of this one, takes 15 s
    assert callable(registry._run_in_subprocess)
    # patch: tests-model-inspection
    registry._run_in_subprocess = lambda inspect_model: inspect_model()
    # it looks through all imported modules, for half a second
    # patch: tests-kernel-overrides
    CpuPlatform.register_triton_kernel_overrides = staticmethod(cache(CpuPlatform.register_triton_kernel_overrides))
    CpuPlatform.register_triton_kernel_overrides()
    # each process would compile these two operations, for three and fifteen seconds
    # patch: tests-compiled-operations
    for owner, name in (
        (sampler, "batched_count_greater_than"),
        (gpu_model_runner, "update_num_computed_tokens_for_batch_change"),
    ):
        setattr(owner, name, unwrap(getattr(owner, name)))
    # eight collections of garbage an engine look through all imported modules, too, unless these stay frozen
    gc.collect()
    gc.freeze()
    assert callable(core.freeze_gc_heap)
    # patch: tests-garbage-collection
    core.freeze_gc_heap = gpu_worker.freeze_gc_heap = gc.unfreeze = lambda: None


def prompt_logprobs(llm: Any, prompt_ids: list[int], lora_request: Any = None) -> list[float]:
    """Log-probability of each next token of a prompt; one token is generated too."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": prompt_ids}]
    output = llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora_request)[0]
    assert len(output.outputs[0].token_ids) == 1
    chosen = zip(output.prompt_logprobs[1:], prompt_ids[1:], strict=True)
    return [logprobs[token].logprob for logprobs, token in chosen]


def main() -> None:
    """Open every checkpoint of a JSON file ``{path: options}``, one after another."""
    for name, options in json.loads(Path(sys.argv[1]).read_text()).items():
        path = Path(name)
        try:
            found = prompt_logprobs(open_engine(path, **options), expected_logprobs(path)[0])
            result = {"path": name, "prompt_logprobs": found}
        except Exception as error:
            result = {"path": name, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
