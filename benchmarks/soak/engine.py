"""Serves one checkpoint under load, in a process of its own, because an engine does not free the memory of its card.

    python -m benchmarks.soak.engine REQUEST.json RESULT.json

The request has the fields of ``Run``; the result is one JSON object.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.resident import resident
from benchmarks.serving import parameters
from benchmarks.serving.variant import check_method, environment
from benchmarks.soak.figures import Answer, Sample, comparison, memory
from benchmarks.soak.traffic import COMPARED, Request, Traffic

SAMPLES = 300
SECONDS_BETWEEN_SAMPLES = 0.2


@dataclass(frozen=True)
class Run:
    """What to serve, and for how long.

    Attributes:
        checkpoint: directory with ``config.json``.
        ragged: whether this plugin must serve the checkpoint.
        random_weights: fill the parameters with random numbers, because the checkpoint has none.
        minutes: time in which requests are sent; those that are running then are finished.
        warm_up_minutes: time after which memory is followed.
        at_once: requests that the engine has at any moment.
        compared: answers to compare with single requests, drawn from all answers with the most likely tokens.
        tensor_parallel_size: option of vLLM.
        enable_expert_parallel: option of vLLM.
        max_model_len: option of vLLM.
        gpu_memory_utilization: option of vLLM.
        enforce_eager: option of vLLM.
        seed: option of vLLM, also the seed of weights and requests.
    """

    checkpoint: str
    ragged: bool
    random_weights: bool
    minutes: float
    warm_up_minutes: float
    at_once: int
    compared: int
    tensor_parallel_size: int
    enable_expert_parallel: bool
    max_model_len: int
    gpu_memory_utilization: float
    enforce_eager: bool
    seed: int


class Soak:
    """An engine under load."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.llm = LLM(
            run.checkpoint,
            load_format="dummy" if run.random_weights else "auto",
            skip_tokenizer_init=True,
            tensor_parallel_size=run.tensor_parallel_size,
            enable_expert_parallel=run.enable_expert_parallel,
            max_model_len=run.max_model_len,
            max_num_seqs=run.at_once,
            gpu_memory_utilization=run.gpu_memory_utilization,
            enforce_eager=run.enforce_eager,
            seed=run.seed,
        )
        self.methods = sorted(set().union(*self.llm.apply_model(parameters.expert_methods)))
        check_method(run.ragged, self.methods)
        if run.random_weights:
            self.llm.apply_model(partial(parameters.fill_at_random, seed=run.seed))
        self.traffic = Traffic(run.seed, self.llm.model_config.get_vocab_size(), run.max_model_len)
        self.reservoir = random.Random(run.seed)
        self.running: dict[str, tuple[Request, int]] = {}
        self.samples: list[Sample] = []
        self.answers: list[tuple[list[int], list[int], list[float]]] = []
        self.finished: dict[str, int] = {}
        self.sent = self.aborted = self.steps = self.comparable = self.prompt_tokens = self.new_tokens = 0

    def serve(self) -> dict[str, Any]:
        """Serve the load, then compare answers with single requests, and return all figures."""
        # the first request may compile
        self.generate([0], max_tokens=2)
        start = time.monotonic()
        seconds, between = 60 * self.run.minutes, max(60 * self.run.minutes / SAMPLES, SECONDS_BETWEEN_SAMPLES)
        while (passed := time.monotonic() - start) < seconds or self.running:
            while passed < seconds and len(self.running) < self.run.at_once:
                self.send()
            if passed < seconds and (not self.samples or passed >= self.samples[-1].seconds + between):
                self.samples.append(Sample(passed, *self.memory()))
            self.step()
        served = time.monotonic() - start
        assert not self.llm.llm_engine.has_unfinished_requests()
        return {
            "experts_run_by": self.methods,
            "seconds": served,
            "requests": self.finished,
            "aborted": self.aborted,
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "memory": memory(self.samples, 60 * self.run.warm_up_minutes),
            "comparison": comparison([self.answer_alone(*each) for each in self.answers]),
            "samples": [list(sample) for sample in self.samples],
        }

    def send(self) -> None:
        request = self.traffic.draw()
        sampling = SamplingParams(
            n=request.answers,
            max_tokens=request.new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **request.sampling,
        )
        name = str(self.sent)
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": request.prompt_ids}, sampling)
        self.running[name] = request, self.steps
        self.sent += 1

    def step(self) -> None:
        """Run one step of the engine, check the answers that it finished, and abort requests whose time has come."""
        outputs = self.llm.llm_engine.step()
        self.steps += 1
        for output in outputs:
            if output.finished and output.request_id in self.running:
                self.finish(self.running.pop(output.request_id)[0], output)
        due = [
            name
            for name, (request, sent) in self.running.items()
            if request.abort_after is not None and self.steps - sent >= request.abort_after
        ]
        if due:
            self.llm.llm_engine.abort_request(due)
            self.aborted += len(due)
            for name in due:
                del self.running[name]

    def finish(self, request: Request, output: Any) -> None:
        assert len(output.outputs) == request.answers, f"{len(output.outputs)} answers, not {request.answers}"
        for completion in output.outputs:
            tokens = list(completion.token_ids)
            assert len(tokens) == request.new, f"{len(tokens)} tokens, not {request.new}"
            if "logprobs" in request.sampling:
                logprobs = logprobs_of(completion.logprobs, tokens)
                assert all(math.isfinite(value) for value in logprobs), f"log-probabilities {logprobs}"
                if request.kind in COMPARED:
                    self.keep(request.prompt_ids, tokens, logprobs)
        self.finished[request.kind] = self.finished.get(request.kind, 0) + 1
        self.prompt_tokens += len(request.prompt_ids)
        self.new_tokens += request.new * request.answers

    def keep(self, prompt_ids: list[int], tokens: list[int], logprobs: list[float]) -> None:
        """Keep an answer such that all answers of the run are as likely to be compared."""
        self.comparable += 1
        if len(self.answers) < self.run.compared:
            self.answers.append((prompt_ids, tokens, logprobs))
        elif (place := self.reservoir.randrange(self.comparable)) < self.run.compared:
            self.answers[place] = prompt_ids, tokens, logprobs

    def memory(self) -> tuple[int | None, int]:
        """Bytes in use on the card, and resident bytes without a file of this process and its descendants."""
        device = [used for used in self.llm.collective_rpc(used_bytes) if used is not None]
        host = resident().anonymous
        for process in psutil.Process().children(recursive=True):
            # a process that has just exited
            with suppress(OSError, KeyError):
                host += resident(process.pid).anonymous
        return max(device, default=None), host

    def answer_alone(self, prompt_ids: list[int], tokens: list[int], logprobs: list[float]) -> Answer:
        """Send an answer's prompt alone, and again with the answer as a part of the prompt."""
        alone = self.generate(prompt_ids, max_tokens=len(tokens), logprobs=0).outputs[0]
        whole = prompt_ids + tokens
        scored = self.generate(whole, max_tokens=1, prompt_logprobs=0).prompt_logprobs
        as_prompt = logprobs_of(scored[len(prompt_ids) :], tokens)
        alone_tokens = list(alone.token_ids)
        return Answer(tokens, logprobs, as_prompt, alone_tokens, logprobs_of(alone.logprobs, alone_tokens))

    def generate(self, prompt_ids: list[int], **options: Any) -> Any:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **options)
        [output] = self.llm.generate([{"prompt_token_ids": prompt_ids}], sampling, use_tqdm=False)
        return output


def logprobs_of(logprobs: Any, tokens: list[int]) -> list[float]:
    """Log-probabilities of the tokens themselves."""
    return [of_position[token].logprob for of_position, token in zip(logprobs, tokens, strict=True)]


def used_bytes(_worker: Any) -> int | None:
    """Bytes of a worker's card that any process uses; ``None`` without a card."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free


def main() -> None:
    where = environment()
    soak = Soak(Run(**json.loads(Path(sys.argv[1]).read_text())))
    Path(sys.argv[2]).write_text(json.dumps({"environment": where, "figures": soak.serve()}))


if __name__ == "__main__":
    main()
