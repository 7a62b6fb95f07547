"""``moe-coverage eval``: tasks of lm-eval on a checkpoint, and a table of the differences between checkpoints."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_coverage_plugin.cli import output
from moe_coverage_plugin.files.model_path import check_model
from moe_coverage_plugin.manifest import CoverageError

if TYPE_CHECKING:
    from moe_coverage_plugin.evaluation import Results

EVAL = """\
Measure a checkpoint on tasks of lm-eval, or on your own questions as JSON lines, and compare it with others.

Checkpoints may be pruned or not. Each task is stored as soon as it is finished: the same command continues an
interrupted run, and adds tasks. lm-eval downloads data sets from the hub; JSON lines need no network
(HF_HUB_OFFLINE=1):

  --multiple-choice  {"question": "...", "choices": ["...", "..."], "answer": 0}
  --text             {"text": "..."}, for perplexity
  --exact-match      {"question": "...", "answer": "... #### 18"}, generated as in GSM8K

For other prompts, write task files in lm-eval's YAML format and give their directory by --include-path; those for JSON
lines are in the package, in evaluation/templates. This needs the extra eval, in the environment of llm-compressor or
vLLM.
"""
EVAL_EXAMPLES = """\
examples:
  moe-coverage eval original --tasks arc_easy piqa --output original.json
  moe-coverage eval pruned --tasks arc_easy piqa --output pruned.json --compare original.json
  moe-coverage eval pruned --tasks gsm8k --few-shot 8 --output served.json --backend vllm \\
      --model-args tensor_parallel_size=2 max_model_len=4096
  moe-coverage eval pruned --multiple-choice quiz.jsonl --fields question=query answer=gold --output pruned.json
  moe-coverage eval --compare original.json pruned.json
"""


def add_eval(command: ArgumentParser) -> None:
    """Add the options of the subcommand."""
    # here, because pydantic takes half a second to import
    from moe_coverage_plugin.cli.option_flags import add_flags
    from moe_coverage_plugin.evaluation.local_tasks import FIELDS
    from moe_coverage_plugin.options import EvaluationOptions

    command.add_argument(
        "checkpoint", metavar="CHECKPOINT", nargs="?", help="directory of a model, or its name on the hub"
    )
    files = command.add_argument_group("results")
    files.add_argument("--output", metavar="FILE", help="JSON file of the results, to write or to add tasks to")
    files.add_argument(
        "--compare",
        nargs="+",
        default=[],
        metavar="FILE",
        help="results to compare with; changes are relative to the first",
    )
    tasks = command.add_argument_group("tasks")
    tasks.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="tasks, groups or tags of lm-eval")
    tasks.add_argument(
        "--include-path", nargs="+", default=[], metavar="DIR", help="directories of further task files for lm-eval"
    )
    for kind in FIELDS:
        tasks.add_argument(
            f"--{kind.replace('_', '-')}", nargs="+", default=[], metavar="FILE", help="JSON lines, each file a task"
        )
    tasks.add_argument(
        "--fields",
        nargs="+",
        default=[],
        metavar="OURS=YOURS",
        help="names of the fields in the JSON lines, if they differ, for example question=query",
    )
    add_flags(tasks, EvaluationOptions, "few_shot", "limit", "seed", "run_unsafe_code")
    model = command.add_argument_group("model")
    add_flags(model, EvaluationOptions, "backend", "dtype", "device", "batch_size", "tokenizer", "trust_remote_code")
    model.add_argument(
        "--model-args", nargs="+", default=[], metavar="NAME=VALUE", help="arguments of vLLM's engine, for vllm only"
    )


def run(arguments: Namespace) -> None:
    """Evaluate, compare, or both, and print a table.

    Raises:
        CoverageError: mistakes that can be found before a model is opened, or results that cannot be compared.
    """
    if arguments.checkpoint is not None:
        check_model(arguments.checkpoint)
    from moe_coverage_plugin.evaluation import Results, compare

    files = [Path(file) for file in arguments.compare]
    # read before the evaluation, which can take hours, so that a damaged file is found first
    results = dict(zip(_labels(files), map(Results.read, files), strict=True))
    if arguments.checkpoint is not None:
        if arguments.output is None:
            raise CoverageError("--output is not given: name the file for the results")
        files.append(Path(arguments.output))
        labels = _labels(files)
        results = dict(zip(labels, [*results.values(), _evaluate(arguments)], strict=True))
    elif not files:
        raise CoverageError("there is nothing to do: give a checkpoint to evaluate, or results to --compare")
    print(output.fact_lines({label: _fact(found) for label, found in results.items()}) + "\n")
    print(output.table(*compare(results)))


def _evaluate(arguments: Namespace) -> Results:
    from moe_coverage_plugin.cli.option_flags import from_flags
    from moe_coverage_plugin.evaluation import EvaluationOptions, LocalTask, evaluate
    from moe_coverage_plugin.evaluation.local_tasks import FIELDS

    fields = dict(map(_assignment, arguments.fields))
    local = [
        LocalTask(kind, Path(file), {name: theirs for name, theirs in fields.items() if name in FIELDS[kind]})
        for kind in FIELDS
        for file in getattr(arguments, kind)
    ]
    if unknown := [name for name in fields if not any(name in task.fields for task in local)]:
        raise CoverageError(
            f"--fields {unknown[0]}=... is not a field of the given kinds of JSON lines: see --help for them"
        )
    model_args = {name: _value(value) for name, value in map(_assignment, arguments.model_args)}
    options = from_flags(EvaluationOptions, arguments, model_args=model_args)
    results = evaluate(arguments.checkpoint, arguments.tasks, arguments.output, options, local, arguments.include_path)
    print(f"Wrote {arguments.output}")
    return results


def _assignment(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not (name and equals and value):
        raise CoverageError(f"{given!r} is not an assignment: write NAME=VALUE")
    return name, value


def _value(given: str) -> Any:
    import yaml

    return yaml.safe_load(given)


def _labels(files: list[Path]) -> list[str]:
    """Names of the files, or their paths if a name occurs twice."""
    names = [file.stem for file in files]
    labels = names if len(set(names)) == len(names) else [str(file) for file in files]
    if len(set(labels)) < len(labels):
        raise CoverageError("a file of results is given twice: leave one out")
    return labels


def _fact(results: Results) -> str:
    engines = {f"{task['settings']['backend']} {task['settings']['dtype']}" for task in results.tasks.values()}
    return ", ".join([results.checkpoint, *sorted(engines)])
