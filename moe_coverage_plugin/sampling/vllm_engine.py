"""Draws continuations by vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from moe_coverage_plugin.sampling.engines import up_to_stop


class VllmEngine:
    """Draws by an engine of vLLM.

    Args:
        llm: a ``vllm.LLM``.
        temperature: divisor of the logits.
    """

    def __init__(self, llm: Any, temperature: float):
        """Keep the engine."""
        self._llm, self._temperature = llm, temperature

    def __call__(self, prompts: Sequence[list[int]], stops: frozenset[int], length: int, seed: int) -> list[list[int]]:
        """Draw (see :class:`Engine`); vLLM shows its own progress bar."""
        # vLLM is not installed where models are compressed
        sampling_params = import_module("vllm").SamplingParams
        params = [
            sampling_params(
                temperature=self._temperature,
                max_tokens=length - len(prompt),
                stop_token_ids=sorted(stops),
                ignore_eos=True,
                detokenize=False,
                # draws of one engine do not depend on how requests are batched
                seed=seed + index,
            )
            for index, prompt in enumerate(prompts)
        ]
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [up_to_stop(list(output.outputs[0].token_ids), stops) for output in outputs]
