"""Opens a checkpoint over several ranks, as a program in a process of its own.

python -m tests.serving.ranks CHECKPOINT OPTIONS    prints one JSON object: answers to prompts, and what ranks hold

vLLM's environment variables (``VLLM_DP_RANK`` and others) make the process one of several data-parallel ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tests.serving.engine import expected_logprobs, open_engine

PROMPTS = 3
TOKENS = 12


class RankProbe:
    """Methods that vLLM gives its workers by the option ``worker_extension_cls``."""

    model_runner: Any

    def allocate_what_stages_exchange(self) -> None:
        # vLLM's worker on a CPU leaves the profile run out in eager mode; a later stage receives into its buffers
        self.model_runner.profile_run()

    def bytes_held(self) -> tuple[int, int]:
        """Of experts, and of all parameters of layers."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        experts = sum(p.nbytes for name, p in parameters.items() if "routed_experts" in name)
        return experts, sum(p.nbytes for name, p in parameters.items() if ".layers." in name)


def gather_tokens_on_cpus() -> None:
    """Give vLLM's communicator for CPUs the two collectives that it lacks for experts under data parallelism."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def own(self: Any, sizes: list[int]) -> slice:
        start = sum(sizes[: self.rank_in_group])
        return slice(start, start + sizes[self.rank_in_group])

    def all_gatherv(self: Any, tensors: list[torch.Tensor], dim: int, sizes: list[int]) -> list[torch.Tensor]:
        assert dim == 0
        gathered = [tensor.new_zeros(sum(sizes), *tensor.shape[1:]) for tensor in tensors]
        for whole, tensor in zip(gathered, tensors, strict=True):
            whole[own(self, sizes)] = tensor
            torch.distributed.all_reduce(whole, group=self.device_group)
        return gathered

    def reduce_scatterv(self: Any, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        assert dim == 0
        total = tensor.clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        return total[own(self, sizes)]

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv


def prompts(path: Path) -> list[list[int]]:
    """The checkpoint's prompt, its first half, its first third."""
    prompt_ids = expected_logprobs(path)[0]
    return [prompt_ids[: len(prompt_ids) // (1 + number)] for number in range(PROMPTS)]


def answer(llm: Any, prompt_ids: list[int], number: int = 0) -> dict[str, list[Any]]:
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


def main() -> None:
    """Answer one prompt, a different one on each data-parallel rank."""
    path, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    number = int(os.environ.get("VLLM_DP_RANK", "0"))
    if "VLLM_DP_RANK" in os.environ:
        gather_tokens_on_cpus()
    llm = open_engine(path, worker_extension_cls="tests.serving.ranks.RankProbe", **options)
    if options.get("pipeline_parallel_size", 1) > 1:
        llm.collective_rpc("allocate_what_stages_exchange")
    found = answer(llm, prompts(path)[number], number)
    print(json.dumps({"answer": found, "bytes_held": llm.collective_rpc("bytes_held")}), flush=True)


if __name__ == "__main__":
    main()
