"""Measures one checkpoint in a process of its own, because an engine keeps what it took of the card.

    python -m benchmarks.serving.variant REQUEST.json RESULT.json

The request holds the fields of ``Request``, the result is one JSON object.
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
RAGGED_METHOD = "RaggedExpertsMethod"


@dataclass(frozen=True)
class Request:
    """What to measure.

    Attributes:
        checkpoint: directory with ``config.json``.
        ragged: whether this plugin must serve it.
        batches: sequences that decode together.
        prompt: tokens of their prompts.
        new: tokens that each of them decodes after the first.
        prefill: tokens of the prompt whose prefill is timed, alone.
        tensor_parallel_size, max_model_len, gpu_memory_utilization, enforce_eager, seed: vLLM's.
    """

    checkpoint: str
    ragged: bool
    batches: tuple[int, ...]
    prompt: int
    new: int
    prefill: int
    tensor_parallel_size: int
    max_model_len: int
    gpu_memory_utilization: float
    enforce_eager: bool
    seed: int


class Bench:
    """An engine on random weights, and prompts that it has never seen, so that no prefix is served from its cache."""

    def __init__(self, request: Request) -> None:
        self.request = request
        start = time.perf_counter()
        self.llm = LLM(
            request.checkpoint,
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=request.tensor_parallel_size,
            max_model_len=request.max_model_len,
            max_num_seqs=max(request.batches),
            gpu_memory_utilization=request.gpu_memory_utilization,
            enforce_eager=request.enforce_eager,
            seed=request.seed,
            # fewer than vLLM's, for a shorter start; the mode of the graphs stays its own
            compilation_config={"cudagraph_capture_sizes": sorted({*GRAPH_SIZES, *request.batches})},
        )
        self.startup_seconds = time.perf_counter() - start
        self.expert_methods = sorted(set().union(*self.llm.apply_model(parameters.expert_methods)))
        check_method(request.ragged, self.expert_methods)
        self.llm.apply_model(partial(parameters.fill_at_random, seed=request.seed))
        self.generator = torch.Generator().manual_seed(request.seed)
        self.vocabulary = self.llm.model_config.get_vocab_size()

    def measure(self) -> dict[str, Any]:
        """All figures of this checkpoint; bytes of the fullest rank, seconds, tokens per second."""
        # the CPU's runner does not measure what loading takes
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
        """Tokens per second of a batch after its first token: what more tokens take longer.

        Of the fastest runs: prefills are a burst of the host's work, and whatever else it does only adds to them.
        """
        short, long = [], []
        # the first repetition compiles and is dropped
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
        """Seconds of one long prompt and one token, the request's way through the engine included; median."""
        seconds = [self.seconds(1, self.request.prefill, 1) for _ in range(1 + PREFILL_REPETITIONS)][1:]
        return {"tokens": self.request.prefill, "median_seconds": statistics.median(seconds), "seconds": seconds}

    def routing(self) -> dict[str, Any]:
        """Experts of a layer that 64 tokens hit, and how many they would if every choice were equally likely."""
        self.llm.apply_model(partial(parameters.watch_routing, tokens=ROUTED_TOKENS))
        self.seconds(1, self.request.prefill, 1)
        found = self.llm.apply_model(parameters.distinct_experts)[0]  # every rank routes all tokens
        config = self.llm.model_config.hf_config
        missed = (1 - config.num_experts_per_tok / config.num_experts) ** ROUTED_TOKENS
        return {"tokens": ROUTED_TOKENS, "distinct_experts": found, "if_even": config.num_experts * (1 - missed)}

    def seconds(self, batch: int, prompt: int, new: int) -> float:
        """Wall-clock of one batch of fresh random prompts; sampled at temperature 1, so that tokens stay random."""
        ids_BS = torch.randint(self.vocabulary, (batch, prompt), generator=self.generator).tolist()
        sampling = SamplingParams(max_tokens=new, temperature=1.0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in ids_BS], sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return seconds

    def check_finite(self) -> None:
        """Make sure that the weights make a model: NaN would be fast or slow for reasons of its own."""
        ids = torch.randint(self.vocabulary, (self.request.prompt,), generator=self.generator).tolist()
        sampling = SamplingParams(max_tokens=1, logprobs=1, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert all(math.isfinite(found.logprob) for found in logprobs[0].values()), f"log-probabilities {logprobs}"


def check_method(ragged: bool, found: list[str]) -> None:
    """Make sure that the plugin serves what is ragged, and nothing else.

    Without weights there is no tensor at which stock vLLM would stop, and it would time the declared width.

    Raises:
        CoverageError: with what runs the experts.
    """
    if ragged != (found == [RAGGED_METHOD]):
        raise CoverageError(
            f"the experts of a {'ragged' if ragged else 'stock'} checkpoint are run by {', '.join(found)}: install "
            "this package where vLLM finds its entry point, and let VLLM_PLUGINS allow it"
        )


def environment() -> dict[str, Any]:
    """The card and versions."""
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
