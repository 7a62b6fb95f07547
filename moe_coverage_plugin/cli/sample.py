"""``moe-coverage sample``: a model writes its own calibration text."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from moe_coverage_plugin.cli.environment import draws_by_vllm
from moe_coverage_plugin.files.model_path import check_model

SAMPLE = """\
Let a model write its own calibration text, for oneshot --data.

Documents are drawn token by token from the start token on, or, if the tokenizer has a chat template, as chats of which
the model writes both turns. Documents that end in a loop or repeat others are left out and counted. vLLM draws if it
is installed here, otherwise transformers. The output is JSON lines with the field text; the first line also has the
provenance.
"""
SAMPLE_EXAMPLES = """\
examples:
  moe-coverage sample path/to/moe --output own.jsonl
  moe-coverage sample path/to/moe --output own.jsonl --samples 128 --length 512 --form text
  moe-coverage oneshot path/to/moe --recipe recommended_p25_q4 --data own.jsonl --output out
"""


def add_sample(command: ArgumentParser) -> None:
    """Add the options of the subcommand."""
    # here, because pydantic takes half a second to import
    from moe_coverage_plugin.cli.option_flags import add_flags
    from moe_coverage_plugin.options import SamplingOptions

    command.add_argument("model", metavar="MODEL", help="directory of a model, or its name on the hub")
    command.add_argument("--output", required=True, metavar="FILE", help="JSON lines to write")
    add_flags(command, SamplingOptions)


def run(arguments: Namespace) -> None:
    """Draw the text and write it.

    Raises:
        CoverageError: a mistake in the arguments, or a model that cannot be opened or writes too little new text.
    """
    from moe_coverage_plugin.cli.option_flags import from_flags
    from moe_coverage_plugin.options import SamplingOptions

    options = from_flags(SamplingOptions, arguments)
    check_model(arguments.model)

    # after the checks, because torch takes seconds to import
    from transformers import AutoConfig, AutoTokenizer

    from moe_coverage_plugin.sampling.run import document_length, sample

    tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=False)
    config = AutoConfig.from_pretrained(arguments.model, trust_remote_code=False)
    if draws_by_vllm(options.engine):
        engine = _vllm_engine(arguments.model, options.temperature, document_length(options.length, config))
    else:
        engine = _transformers_engine(arguments.model, options)
    sampled = sample(engine, tokenizer, config, options, arguments.model)
    sampled.write(Path(arguments.output))
    left_out = sampled.provenance["left_out"]
    print(
        f"Wrote {arguments.output}: {len(sampled.documents)} documents, {sampled.tokens} tokens; left out "
        f"{left_out['loops']} that end in loops and {left_out['duplicates']} that repeat others"
    )
    print(
        f"  moe-coverage oneshot {arguments.model} --recipe recommended_p25_q4 --data {arguments.output} --output out"
    )


def _vllm_engine(model: str, temperature: float, length: int) -> Any:
    from importlib import import_module

    from moe_coverage_plugin.sampling.vllm_engine import VllmEngine

    llm = import_module("vllm").LLM(model, max_model_len=length, generation_config="vllm")
    return VllmEngine(llm, temperature)


def _transformers_engine(model: str, options: Any) -> Any:
    import torch

    from moe_coverage_plugin.checkpoint.opening import open_model
    from moe_coverage_plugin.sampling.transformers_engine import TransformersEngine

    opened = open_model(model, "auto" if torch.cuda.is_available() else None)
    return TransformersEngine(opened, options.temperature, options.batch_size)
