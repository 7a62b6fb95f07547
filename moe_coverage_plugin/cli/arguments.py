"""The command line: subcommands, options and what they are for."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping
from typing import Any

CHOICES = {
    "scope": ("layers", "global"),
    "inter_layer": ("uniform", "u_shaped", "loss", "coverage"),
    "intra_layer": ("uniform", "loss", "router_weight", "usage", "topk_channel", "coverage"),
    "layer_prior": ("loss", "uniform"),
    "expert_prior": ("attribution", "loss", "usage", "router_weight", "uniform"),
    "expert_importance": ("first_order", "second_order", "nll_signed", "nll_absolute", "nll_squared"),
    "smoothing": ("none", "sqrt", "log", "huber", "clip"),
    "strategy": ("hamilton", "blocks"),
    "rule": ("l-r-c", "l-r-s"),
}
"""Spelled out, since the types that they are of lie beside code that imports torch, which takes seconds."""

DESCRIPTION = """\
Channel pruning of mixture-of-experts models: look at a plan before making it, and at a checkpoint after.
"""

PLAN = """\
Show what a plan would do, without touching a model.

A run with save_scores in AttributionModifier leaves a score file, and so does every checkpoint, as
moe_coverage_scores.bin. From it any number of plans can be tried in seconds: how many channels every layer keeps, what
share of the channel scores they hold (coverage), which experts are removed. Defaults are those of the recommended
recipes; give the same values to CoverageModifier and AlignmentModifier, with the file as scores of
AttributionModifier, to make the plan that is shown.
"""
PLAN_EXAMPLES = """\
examples:
  moe-coverage plan scores.bin --sparsity 0.25
  moe-coverage plan scores.bin --sparsity 0.5 --block-size 64 --pictures plan/
  moe-coverage plan scores.bin --sparsity 0.25 --scope layers --inter-layer uniform --intra-layer coverage \\
      --strategy hamilton
"""

INSPECT = """\
Show what a pruned checkpoint holds: widths, removed experts, bytes, coverage, calibration tokens, quantization, where
it came from, and over how many ranks vLLM can spread it.

Reads config.json, moe_coverage_report.json and the headers of the weight files; no weight is loaded.
"""
INSPECT_EXAMPLES = """\
examples:
  moe-coverage inspect out
  moe-coverage inspect out --json out.json --pictures pictures/
"""

PARETO = """\
Draw accuracy over bytes for a set of measured models, and mark those that no other beats in both.
"""
PARETO_EXAMPLES = """\
example:
  moe-coverage pareto results.jsonl --output pareto.png
"""

Run = Callable[[Any], None]


def build_parser(run: Mapping[str, Run]) -> ArgumentParser:
    """The parser of ``moe-coverage``.

    Args:
        run: for each subcommand what is called with its parsed arguments, as their attribute ``run``.
    """
    parser = ArgumentParser("moe-coverage", description=DESCRIPTION)
    commands = parser.add_subparsers(title="subcommands", metavar="COMMAND", required=True)
    for name, summary, description, examples, add_options in (
        ("plan", "what a plan would do, from measured scores", PLAN, PLAN_EXAMPLES, _add_plan),
        (
            "inspect",
            "what a pruned checkpoint holds and how it can be served",
            INSPECT,
            INSPECT_EXAMPLES,
            _add_inspect,
        ),
        ("pareto", "accuracy over bytes of measured models", PARETO, PARETO_EXAMPLES, _add_pareto),
    ):
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=examples,
            formatter_class=RawDescriptionHelpFormatter,
        )
        add_options(command)
        command.set_defaults(run=run[name])
    return parser


def _add_plan(command: ArgumentParser) -> None:
    command.add_argument("scores", metavar="SCORES", help="score file")
    command.add_argument(
        "--sparsity",
        type=float,
        required=True,
        metavar="P",
        help="fraction of the expert channels to remove, in [0, 1)",
    )
    coverage = command.add_argument_group("budgets, as in CoverageModifier")
    for option, default, text in (
        ("scope", "global", "share the budget once among all experts (global), or among layers first (layers)"),
        ("inter_layer", None, "how layers share it, only with --scope layers (default: coverage)"),
        ("intra_layer", "topk_channel", "how the experts of a layer, or all, share it"),
        ("layer_prior", None, "weight of layers in coverage, only with --scope layers (default: loss)"),
        ("expert_prior", "attribution", "weight of experts in coverage"),
        ("expert_importance", "first_order", "which measure attribution stands for, as in AttributionModifier"),
        ("smoothing", "sqrt", "how weights are brought closer together"),
    ):
        _add_choice(coverage, option, default, text)
    alignment = command.add_argument_group("whole blocks, as in AlignmentModifier")
    _add_choice(alignment, "strategy", "blocks", "take the best blocks (blocks), or round widths (hamilton)")
    alignment.add_argument(
        "--block-size",
        type=int,
        default=128,
        metavar="A",
        help="every width is a multiple of it (default: %(default)s)",
    )
    alignment.add_argument(
        "--min-width",
        type=int,
        metavar="M",
        help="narrower experts are removed, only with --strategy hamilton (default: 128)",
    )
    _add_choice(alignment, "rule", None, "remainders by channels or by score, only with hamilton (default: l-r-c)")
    _add_files(command)


def _add_inspect(command: ArgumentParser) -> None:
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="directory of a pruned checkpoint")
    _add_files(command)


def _add_pareto(command: ArgumentParser) -> None:
    command.add_argument("results", metavar="RESULTS.jsonl", help="one JSON object per measured model")
    command.add_argument("--output", required=True, metavar="FILE", help="picture (.png) or page (.html) to write")


def _add_choice(group: Any, option: str, default: str | None, text: str) -> None:
    group.add_argument(
        f"--{option.replace('_', '-')}",
        choices=CHOICES[option],
        default=default,
        help=text if default is None else f"{text} (default: %(default)s)",
    )


def _add_files(command: ArgumentParser) -> None:
    files = command.add_argument_group("files")
    files.add_argument("--json", metavar="FILE", help="write everything shown, and every width, as JSON")
    files.add_argument("--pictures", metavar="DIR", help="draw it: a page and its pictures")
