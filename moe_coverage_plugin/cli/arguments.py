"""The parser of the command line: subcommands, options and their help."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping
from typing import Any

from moe_coverage_plugin.cli.early import OWN
from moe_coverage_plugin.cli.evaluation import EVAL, EVAL_EXAMPLES, add_eval
from moe_coverage_plugin.cli.finetune import FINETUNE, FINETUNE_EXAMPLES, add_finetune
from moe_coverage_plugin.cli.sample import SAMPLE, SAMPLE_EXAMPLES, add_sample

DESCRIPTION = """\
Makes mixture-of-experts models smaller: removes channels inside experts, a different number in each, and lets
llm-compressor quantize the rest. vLLM serves the result if this package is installed in its environment, too.
"""
WHICH_WHEN = """\
which command when:
  oneshot    you have a model, and want a smaller one
  sample     you want the text that a model writes itself in a file, or drawn by vLLM, which is faster
  finetune   you have a pruned checkpoint, more text and a GPU, and want to reduce its loss
  plan       you have a score file (every checkpoint has one) and want to try another sparsity or block size
  inspect    you have a checkpoint, and want to see its widths and the numbers of GPUs that can serve it
  eval       you have a checkpoint, and want to measure it and compare it with the original
  pareto     you have measured several checkpoints and want to choose one

  For details, see moe-coverage COMMAND --help. A mistake in the input is reported in one line, with exit status 2.
"""

ONESHOT = """\
Compress a model by a recipe: measure on text, prune, quantize if the recipe says so, and write a checkpoint.

Calls llmcompressor.oneshot. The model is opened without a second copy of its experts in memory. By default it writes
its own text to calibrate on, which is of all kinds that it was trained on. Your text is cut into windows of tokens;
--samples of them are used, evenly spread over all files. Recipes of the package:

  recommended_p25_q4, recommended_p50_q4    25 or 50 % of the expert channels removed, then 4 bits
  recommended_p50                           the same without quantization
  fisher_p25_q4, fisher_p50_q4, fisher_p50  one pass over the text less, and more loss
  coverage_p25_q4[_a64], coverage_p25_gptq[_a64], coverage_p50    the method of the paper, for comparison

Also written: a model card (README.md), the scores, for other plans, and a page that shows what was kept and why.
"""
ONESHOT_EXAMPLES = """\
examples:
  moe-coverage oneshot path/to/moe --recipe recommended_p25_q4 --output out
  moe-coverage oneshot path/to/moe --recipe recommended_p25_q4 --data own code.txt prose.jsonl --output out
  moe-coverage oneshot path/to/moe --recipe recommended_p50 --recipe-args sparsity=0.4 block_size=64 \\
      --data text.txt --samples 128 --sequence-length 1024 --output out
"""

PLAN = """\
Show what a plan would keep, without touching a model.

Every checkpoint contains a score file, moe_coverage/scores.safetensors, and save_scores of AttributionModifier writes
one. From it, many plans can be tried in seconds: channels that every layer keeps, the share of the channel scores in
them (coverage), and removed experts. The defaults are those of the modifiers. To make a plan that was shown, give the
same values to CoverageModifier and AlignmentModifier, and the file to AttributionModifier as scores.
"""
PLAN_EXAMPLES = """\
examples:
  moe-coverage plan scores.safetensors --sparsity 0.25
  moe-coverage plan scores.safetensors --sparsity 0.5 --block-size 64 --pictures plan/
  moe-coverage plan scores.safetensors --sparsity 0.25 --scope layers --inter-layer uniform --intra-layer coverage \\
      --strategy hamilton
"""

INSPECT = """\
Show the contents of a pruned checkpoint: widths, removed experts, bytes, coverage, calibration tokens, quantization,
provenance, and the tensor-parallel degrees at which vLLM can serve it.

Reads config.json, moe_coverage_report.json and the headers of the weight files; no weight is loaded.
"""
INSPECT_EXAMPLES = """\
examples:
  moe-coverage inspect out
  moe-coverage inspect out --json out.json --pictures pictures/
"""

PARETO = """\
Draw held-out loss against bytes of measured checkpoints, and mark those for which no other is smaller and better.

RESULTS.jsonl has one JSON object per checkpoint, with name, method, bytes and loss.
"""
PARETO_EXAMPLES = """\
example:
  moe-coverage pareto results.jsonl --output pareto.png
"""

Run = Callable[[Any], None]


class Command(ArgumentParser):
    """A subcommand that adds its options when it is used, so that other subcommands need not import their source."""

    add_options: Callable[[ArgumentParser], None] | None = None

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Add the options, then parse."""
        if self.add_options is not None:
            add_options, self.add_options = self.add_options, None
            add_options(self)
        return super().parse_known_args(*args, **kwargs)


def build_parser(run: Mapping[str, Run]) -> ArgumentParser:
    """The parser of ``moe-coverage``.

    Args:
        run: function for each subcommand; the parsed arguments have it as their attribute ``run``.
    """
    parser = ArgumentParser(
        "moe-coverage", description=DESCRIPTION, epilog=WHICH_WHEN, formatter_class=RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(title="subcommands", metavar="COMMAND", required=True, parser_class=Command)
    for name, summary, description, examples, add_options in (
        ("oneshot", "prune and quantize a model by a recipe", ONESHOT, ONESHOT_EXAMPLES, _add_oneshot),
        ("sample", "let a model write its own calibration text", SAMPLE, SAMPLE_EXAMPLES, add_sample),
        ("finetune", "reduce the loss of a pruned checkpoint", FINETUNE, FINETUNE_EXAMPLES, add_finetune),
        ("plan", "show what a plan would keep, from measured scores", PLAN, PLAN_EXAMPLES, _add_plan),
        (
            "inspect",
            "show a pruned checkpoint, and how it can be served",
            INSPECT,
            INSPECT_EXAMPLES,
            _add_inspect,
        ),
        ("eval", "measure a checkpoint on tasks of lm-eval", EVAL, EVAL_EXAMPLES, add_eval),
        ("pareto", "draw loss against bytes of measured checkpoints", PARETO, PARETO_EXAMPLES, _add_pareto),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=examples,
            formatter_class=RawDescriptionHelpFormatter,
        )
        command.add_options = add_options
        command.set_defaults(run=run[name])
    return parser


def _add_oneshot(command: ArgumentParser) -> None:
    command.add_argument("model", metavar="MODEL", help="directory of a model, or its name on the hub")
    command.add_argument("--output", required=True, metavar="OUT", help="directory to write; must be new or empty")
    recipe = command.add_argument_group("recipe")
    recipe.add_argument(
        "--recipe", required=True, metavar="RECIPE", help="YAML file, or name of a recipe of the package"
    )
    recipe.add_argument(
        "--recipe-args",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="values for fields of the pruning modifiers, for example sparsity=0.3; not for quantizers",
    )
    data = command.add_argument_group("calibration data")
    data.add_argument(
        "--data",
        nargs="+",
        default=[OWN],
        metavar="PATH",
        help="own: text that the model writes itself (default); files of text, JSON lines (.jsonl), Parquet or CSV; "
        "own and files, half of the windows each; or one data set of text or input_ids, a directory written by "
        "datasets.save_to_disk",
    )
    data.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="column of the text in files with rows and data sets (default: %(default)s)",
    )
    data.add_argument(
        "--samples", type=int, default=512, metavar="N", help="windows of text to calibrate on (default: %(default)s)"
    )
    data.add_argument(
        "--sequence-length",
        type=int,
        metavar="TOKENS",
        help="tokens of a window (default: 2048, or the model's limit if that is less)",
    )
    data.add_argument(
        "--batch-size",
        type=int,
        default=1,
        metavar="N",
        help="windows at a time (default: %(default)s)",
    )
    data.add_argument("--seed", type=int, default=0, help="seed of random numbers (default: %(default)s)")
    command.add_argument_group("memory").add_argument(
        "--device-map",
        metavar="MAP",
        help="place of the weights, as in transformers: auto for GPUs and CPU memory, auto_offload for CPU memory "
        "and, for what does not fit there, disk; disk for all weights on disk (default: CPU memory)",
    )


def _add_plan(command: ArgumentParser) -> None:
    # here, because pydantic takes half a second to import
    from moe_coverage_plugin.cli.option_flags import add_flags
    from moe_coverage_plugin.options import (
        AlignmentOptions,
        AttributionOptions,
        ChannelPruningOptions,
        CoverageOptions,
    )

    command.add_argument("scores", metavar="SCORES", help="score file")
    budgets = command.add_argument_group("budgets, as in CoverageModifier")
    add_flags(budgets, CoverageOptions)
    add_flags(budgets, AttributionOptions, "expert_importance")
    add_flags(command.add_argument_group("blocks, as in AlignmentModifier"), AlignmentOptions)
    add_flags(command.add_argument_group("storage, as in ChannelPruningModifier"), ChannelPruningOptions, "layout")
    _add_files(command)


def _add_inspect(command: ArgumentParser) -> None:
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="directory of a pruned checkpoint")
    _add_files(command)


def _add_pareto(command: ArgumentParser) -> None:
    command.add_argument("results", metavar="RESULTS.jsonl", help="one JSON object per measured checkpoint")
    command.add_argument("--output", required=True, metavar="FILE", help="picture (.png) or page (.html) to write")


def _add_files(command: ArgumentParser) -> None:
    files = command.add_argument_group("files")
    files.add_argument("--json", metavar="FILE", help="write the summary, with all widths, as JSON")
    files.add_argument("--pictures", metavar="DIR", help="write a page with pictures")
