"""Opens checkpoints over several ranks, one after another, as a program in a process of its own.

python -m tests.serving.ranks OPTIONS CHECKPOINT...    prints a JSON object for each: outputs, and bytes of ranks

vLLM's environment variables (``VLLM_DP_RANK`` and others) make the process one of several data-parallel ranks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from benchmarks.serving.expert_ranks import data_parallel_environments
from benchmarks.serving.parameters import count_tokens, counted_tokens
from moe_coverage_plugin.manifest import Manifest
from tests import processes
from tests.serving.engine import REPOSITORY, expected_logprobs, open_engine

# by rank and name of a layer's experts, see benchmarks.serving.parameters
Counted = list[dict[str, dict[str, list[int]]]]

PROMPTS = 3
TOKENS = 12
CROWD = 32


class RankProbe:
    """Methods that vLLM adds to its workers by the option ``worker_extension_cls``."""

    model_runner: Any

    def allocate_what_stages_exchange(self) -> None:
        # a later stage receives into the buffers that this allocates
        # patch: tests-cpu-pipeline
        self.model_runner.profile_run()

    def bytes_held(self) -> tuple[int, int]:
        """Bytes of experts, and of all parameters of layers."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        experts = sum(p.nbytes for name, p in parameters.items() if "routed_experts" in name)
        return experts, sum(p.nbytes for name, p in parameters.items() if ".layers." in name)

    def count_tokens(self) -> None:
        count_tokens(self.model_runner.get_model())

    def counted_tokens(self) -> dict[str, dict[str, list[int]]]:
        return counted_tokens(self.model_runner.get_model())


def fork_workers() -> None:
    """Make vLLM fork its processes, instead of starting interpreters that import it again."""
    from vllm.v1.engine import utils
    from vllm.v1.executor import multiproc_executor

    for module in (utils, multiproc_executor):
        assert callable(module.get_mp_context)
        # patch: tests-forked-workers
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


def gather_tokens_on_cpus() -> None:
    """Add the two collectives that vLLM's communicator for CPUs lacks for experts under data parallelism."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def own(self: Any, sizes: list[int]) -> slice:
        start = sum(sizes[: self.rank_in_group])
        return slice(start, start + sizes[self.rank_in_group])

    def all_gatherv(self: Any, tensors: list[torch.Tensor], dim: int, sizes: list[int]) -> list[torch.Tensor]:
        assert dim == 0
        gathered = [tensor.new_zeros(sum(sizes), *tensor.shape[1:]) for tensor in tensors]
        for all_rows, tensor in zip(gathered, tensors, strict=True):
            all_rows[own(self, sizes)] = tensor
            torch.distributed.all_reduce(all_rows, group=self.device_group)
        return gathered

    def reduce_scatterv(self: Any, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        assert dim == 0
        total = tensor.clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        return total[own(self, sizes)]

    # patch: cpu-data-parallel
    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def prompts(path: Path) -> list[list[int]]:
    """The checkpoint's prompt, its first half, its first third."""
    prompt_ids = expected_logprobs(path)[0]
    return [prompt_ids[: len(prompt_ids) // (1 + number)] for number in range(PROMPTS)]


def generate(llm: Any, prompt_ids: list[int], number: int = 0) -> dict[str, list[Any]]:
    """Greedy tokens, fewer after later prompts, and log-probabilities of them and of the prompt."""
    from vllm import SamplingParams

    tokens = TOKENS // (1 + number)
    options = {"temperature": 0, "logprobs": 0, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
    sampling = SamplingParams(max_tokens=tokens, **options)
    output = llm.generate([{"prompt_token_ids": prompt_ids}], sampling, use_tqdm=False)[0]
    generated = list(output.outputs[0].token_ids)
    assert len(generated) == tokens
    return {
        "tokens": generated,
        "logprobs": [each[token].logprob for each, token in zip(output.outputs[0].logprobs, generated, strict=True)],
        "prompt_logprobs": [
            each[token].logprob for each, token in zip(output.prompt_logprobs[1:], prompt_ids[1:], strict=True)
        ],
    }


def in_crowd(llm: Any, prompt_ids: list[int]) -> list[float]:
    """Log-probabilities of a prompt that is served together with many others, in one batch if they fit."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    others = [[*prompt_ids[shift:], *prompt_ids[:shift]] for shift in range(1, CROWD)]
    crowd = [{"prompt_token_ids": ids} for ids in ([*prompt_ids], *others)]
    logprobs = llm.generate(crowd, sampling, use_tqdm=False)[0].prompt_logprobs
    return [each[token].logprob for each, token in zip(logprobs[1:], prompt_ids[1:], strict=True)]


def assert_held_once(path: Path, counted: Counted) -> None:
    """Every expert is on one of two ranks, entire."""
    manifest = Manifest.from_checkpoint(path)
    assert manifest is not None
    for name, widths_E in manifest.widths.items():
        one, two = (each[name]["widths"] for each in counted)
        assert [sorted(pair) for pair in zip(one, two, strict=True)] == [[0, width] for width in widths_E]


def pairs_of_token_and_expert(path: Path, number: int) -> int:
    """Of a prompt and its answer in one layer; the last token of the answer is not computed with."""
    config = json.loads((path / "config.json").read_text())
    return (len(prompts(path)[number]) + TOKENS // (1 + number) - 1) * config["num_experts_per_tok"]


def assert_two_ranks_counted(path: Path, counted: Counted) -> None:
    """Data-parallel ranks hold every expert once, and compute the tokens of the other rank, too."""
    assert_held_once(path, counted)
    for rank, layers in enumerate(counted):
        own = pairs_of_token_and_expert(path, rank)
        assert all(sum(layer["tokens"]) > own for layer in layers.values())


def start(paths: Path | list[Path], options: dict[str, Any], **environment: str) -> processes.Program:
    """This program on one checkpoint or several, in a process of its own."""
    several = paths if isinstance(paths, list) else [paths]
    arguments = ("-m", "tests.serving.ranks", json.dumps(options), *several)
    return processes.start(*arguments, cwd=REPOSITORY, env=os.environ | environment)


def start_data_parallel(
    path: Path, options: dict[str, Any], environments: Sequence[dict[str, str]]
) -> list[processes.Program]:
    """This program on one checkpoint, once for each data-parallel rank, with environment variables of its own."""
    shared = data_parallel_environments(len(environments))
    return [start(path, options, **one, **own) for one, own in zip(shared, environments, strict=True)]


def finish(*programs: processes.Program) -> list[dict[str, Any]]:
    """The JSON objects that programs printed, in order; if one fails, the others, which wait for it, are killed."""
    processes.finish(programs, timeout=300)
    lines = [line for each in programs for line in each.stdout.splitlines() if line.startswith('{"output"')]
    return [json.loads(line) for line in lines]


def main() -> None:
    """Generate from one prompt of each checkpoint, a different one on each data-parallel rank."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        fork_workers()
    if current_platform.is_cpu() and "VLLM_DP_RANK" in os.environ:
        gather_tokens_on_cpus()
    for path in sys.argv[2:]:
        print(json.dumps(outputs(Path(path), json.loads(sys.argv[1]))), flush=True)


def outputs(path: Path, options: dict[str, Any]) -> dict[str, Any]:
    """What an engine on a checkpoint generates, bytes of its ranks, and the tokens that they count without graphs."""
    from vllm.platforms import current_platform

    number = int(os.environ.get("VLLM_DP_RANK", "0"))
    llm = open_engine(path, worker_extension_cls="tests.serving.ranks.RankProbe", **options)
    if current_platform.is_cpu() and options.get("pipeline_parallel_size", 1) > 1:
        llm.collective_rpc("allocate_what_stages_exchange")
    prompt_ids = prompts(path)[number]
    llm.collective_rpc("count_tokens")
    found = generate(llm, prompt_ids, number)
    counted = llm.collective_rpc("counted_tokens")
    # the tokens that were decoded one by one, now as part of a prompt
    as_prompt = generate(llm, prompt_ids + found["tokens"], number)["prompt_logprobs"]
    found["logprobs_as_prompt"] = as_prompt[len(prompt_ids) - 1 :]
    if not current_platform.is_cpu():
        found["logprobs_in_crowd"] = in_crowd(llm, prompt_ids)
    result = {"output": found, "bytes_held": llm.collective_rpc("bytes_held"), "counted": counted}
    llm.llm_engine.engine_core.shutdown()
    return result


if __name__ == "__main__":
    main()
