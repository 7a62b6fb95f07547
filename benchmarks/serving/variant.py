"""Measures one checkpoint. It runs in its own process, because an engine does not free the memory of its card.

    python -m benchmarks.serving.variant REQUEST.json RESULT.json

The request has the fields of ``Request``; the result is one JSON object.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from benchmarks.serving import parameters
from moe_coverage_plugin.manifest import CoverageError

GRAPH_SIZES = (1, 2, 4, 8, 16, 64, 256)
DECODE_REPETITIONS = 3
PREFILL_REPETITIONS = 15
ROUTED_TOKENS = 64


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        checkpoint: directory with ``config.json``.
        ragged: whether this plugin must serve the checkpoint.
        batches: numbers of sequences that decode together.
        prompt: tokens of each prompt.
        new: tokens that each sequence decodes after the first one.
        prefill: tokens of the prompt whose prefill is timed.
        tensor_parallel_size: option of vLLM.
        enable_expert_parallel: option of vLLM.
        max_model_len: option of vLLM.
        gpu_memory_utilization: option of vLLM.
        enforce_eager: option of vLLM.
        seed: option of vLLM, also the seed of weights and prompts.
    """

    checkpoint: str
    ragged: bool
    batches: tuple[int, ...]
    prompt: int
    new: int
    prefill: int
    tensor_parallel_size: int
    enable_expert_parallel: bool
    max_model_len: int
    gpu_memory_utilization: float
    enforce_eager: bool
    seed: int


class Bench:
    """An engine with random weights. Prompts are new in each run, so that no prefix is in the engine's cache."""

    def __init__(self, request: Request) -> None:
        self.request = request
        start = time.perf_counter()
        self.llm = LLM(
            request.checkpoint,
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=request.tensor_parallel_size,
            enable_expert_parallel=request.enable_expert_parallel,
            max_model_len=request.max_model_len,
            max_num_seqs=max(request.batches),
            gpu_memory_utilization=request.gpu_memory_utilization,
            enforce_eager=request.enforce_eager,
            seed=request.seed,
            # fewer sizes than by default, for a shorter start; the mode of the graphs is the default
            compilation_config={"cudagraph_capture_sizes": sorted({*GRAPH_SIZES, *request.batches})},
        )
        self.startup_seconds = time.perf_counter() - start
        self.expert_methods = sorted(set().union(*self.llm.apply_model(parameters.expert_methods)))
        check_method(request.ragged, self.expert_methods)
        self.llm.apply_model(partial(parameters.fill_at_random, seed=request.seed))
        self.generator = torch.Generator().manual_seed(request.seed)
        self.vocabulary = self.llm.model_config.get_vocab_size()

    def measure(self) -> dict[str, Any]:
        """Return all figures of this checkpoint; bytes are those of the rank with most bytes."""
        # the CPU's model runner does not measure the memory that loading takes
        loading = None if current_platform.is_cpu() else max(self.llm.collective_rpc(parameters.loading_bytes))
        return {
            "experts_run_by": self.expert_methods,
            "startup_seconds": self.startup_seconds,
            "loading_bytes": loading,
            "parameter_bytes": max(self.llm.apply_model(parameters.parameter_bytes)),
            "expert_bytes_by_rank": self.llm.apply_model(parameters.expert_bytes),
            "decode": [self.decode(batch) for batch in self.request.batches],
            "prefill": self.prefill(),
            "routing": self.routing(),
        }

    def decode(self, batch: int) -> dict[str, Any]:
        """Return tokens per second of a batch, without the prefill.

        The time is that of runs with several tokens minus that of runs with one token. Of repeated runs, the fastest
        are used, because a prefill needs much work of the host, and other processes can only make it slower.
        """
        short, long = [], []
        # the first repetition also compiles, so it is not used
        for _ in range(1 + DECODE_REPETITIONS):
            short.append(self.seconds(batch, self.request.prompt, 1))
            long.append(self.seconds(batch, self.request.prompt, 1 + self.request.new))
        seconds = min(long[1:]) - min(short[1:])
        return {
            "batch": batch,
            "tokens_per_second": batch * self.request.new / seconds,
            "seconds_of_first_token": short[1:],
            "seconds_of_all_tokens": long[1:],
        }

    def prefill(self) -> dict[str, Any]:
        """Return the median of seconds from a request with one long prompt to its only token."""
        seconds = [self.seconds(1, self.request.prefill, 1) for _ in range(1 + PREFILL_REPETITIONS)][1:]
        return {"tokens": self.request.prefill, "median_seconds": statistics.median(seconds), "seconds": seconds}

    def routing(self) -> dict[str, Any]:
        """Return the number of different experts of 64 tokens in a layer, and its expectation for uniform routing."""
        self.llm.apply_model(partial(parameters.record_routing, tokens=ROUTED_TOKENS))
        self.seconds(1, self.request.prefill, 1)
        # the first rank is sufficient, because every rank routes all tokens
        found = self.llm.apply_model(parameters.distinct_experts)[0]
        config = self.llm.model_config.hf_config
        missed = (1 - config.num_experts_per_tok / config.num_experts) ** ROUTED_TOKENS
        return {"tokens": ROUTED_TOKENS, "distinct_experts": found, "if_even": config.num_experts * (1 - missed)}

    def seconds(self, batch: int, prompt: int, new: int) -> float:
        """Return the wall-clock time of one batch of new random prompts, sampled at temperature 1."""
        ids_BS = torch.randint(self.vocabulary, (batch, prompt), generator=self.generator).tolist()
        sampling = SamplingParams(max_tokens=new, temperature=1.0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in ids_BS], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return seconds

    def check_finite(self) -> None:
        """Check that outputs are finite: with NaN, the speed would not be that of a model."""
        ids = torch.randint(self.vocabulary, (self.request.prompt,), generator=self.generator).tolist()
        sampling = SamplingParams(max_tokens=1, logprobs=1, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert all(math.isfinite(found.logprob) for found in logprobs[0].values()), f"log-probabilities {logprobs}"


def check_method(ragged: bool, found: list[str]) -> None:
    """Check that the plugin serves ragged checkpoints and no others.

    Stock vLLM does not detect a ragged checkpoint without weights, and would run experts of the declared width.

    Args:
        ragged: whether the checkpoint is ragged.
        found: class names of the methods that run the experts.

    Raises:
        CoverageError: if other methods run the experts.
    """
    if ragged != (found == [parameters.RAGGED_METHOD]):
        raise CoverageError(
            f"the experts of a {'ragged' if ragged else 'stock'} checkpoint are run by {', '.join(found)}: install "
            "this package into vLLM's environment, and add it to VLLM_PLUGINS if that is set"
        )


def environment() -> dict[str, Any]:
    """Return the card and versions of packages."""
    card = f"{platform.machine()} CPU" if current_platform.is_cpu() else current_platform.get_device_name()
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    for package in ("moe-coverage-plugin", "transformers", "triton"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {"card": card, "versions": versions}


def main() -> None:
    where = environment()
    bench = Bench(Request(**json.loads(Path(sys.argv[1]).read_text())))
    bench.check_finite()
    Path(sys.argv[2]).write_text(json.dumps({"environment": where, "figures": bench.measure()}))


if __name__ == "__main__":
    main()
