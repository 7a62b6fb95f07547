"""``moe-coverage eval``: tasks of lm-eval on a checkpoint, and a table of what changed."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_coverage_plugin.cli import output
from moe_coverage_plugin.manifest import CoverageError

if TYPE_CHECKING:
    from moe_coverage_plugin.evaluation import Results

# as in evaluation, which needs more than Python alone
BACKENDS = ("hf", "vllm")
DTYPES = ("bfloat16", "float16", "float32")
KINDS = ("multiple_choice", "text", "exact_match")

EVAL = """\
Measure a checkpoint on tasks of lm-eval, or on your own questions as JSON lines, and compare it with others.

Pruned checkpoints and all others that the backend opens. Every task is stored as soon as it is done: the same command
goes on where an earlier one was interrupted, and adds tasks. lm-eval fetches data sets from the hub; JSON lines need
no network (HF_HUB_OFFLINE=1):

  --multiple-choice  {"question": "...", "choices": ["...", "..."], "answer": 0}
  --text             {"text": "..."}, for perplexity
  --exact-match      {"question": "...", "answer": "... #### 18"}, generated as in GSM8K

Other prompts: task files in lm-eval's YAML format, by --include-path; those that are used for JSON lines lie in the
package, in evaluation/templates. Install: pip install "moe-coverage-plugin[compress,eval]", or [serve,eval] for vLLM.
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
    """Give the subcommand its options."""
    command.add_argument(
        "checkpoint", metavar="CHECKPOINT", nargs="?", help="directory of a model, or its name on the hub"
    )
    files = command.add_argument_group("results")
    files.add_argument("--output", metavar="FILE", help="JSON file of the results, written and added to")
    files.add_argument(
        "--compare", nargs="+", default=[], metavar="FILE", help="results to show beside it, the first as the measure"
    )
    tasks = command.add_argument_group("tasks")
    tasks.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="tasks, groups or tags of lm-eval")
    tasks.add_argument(
        "--include-path", nargs="+", default=[], metavar="DIR", help="directories of further task files for lm-eval"
    )
    for kind in KINDS:
        tasks.add_argument(
            f"--{kind.replace('_', '-')}", nargs="+", default=[], metavar="FILE", help="JSON lines, each file a task"
        )
    tasks.add_argument(
        "--fields",
        nargs="+",
        default=[],
        metavar="OURS=YOURS",
        help="what lines call a field, as question=query",
    )
    tasks.add_argument("--few-shot", type=int, metavar="N", help="worked examples (default: the task's own number)")
    tasks.add_argument("--limit", type=int, metavar="N", help="only the first N documents of each task")
    tasks.add_argument("--seed", type=int, default=1234, help="of what is drawn (default: %(default)s)")
    tasks.add_argument(
        "--run-unsafe-code", action="store_true", help="let tasks such as humaneval run what the model writes"
    )
    model = command.add_argument_group("model")
    model.add_argument("--backend", choices=BACKENDS, default="hf", help="transformers or vLLM (default: %(default)s)")
    model.add_argument("--dtype", choices=DTYPES, help="what is computed in (default: the checkpoint's)")
    model.add_argument("--device", metavar="NAME", help="for hf (default: a GPU where there is one)")
    model.add_argument("--batch-size", type=int, default=8, metavar="N", help="for hf (default: %(default)s)")
    model.add_argument(
        "--model-args", nargs="+", default=[], metavar="NAME=VALUE", help="for vllm: arguments of its engine"
    )
    model.add_argument("--tokenizer", metavar="DIR", help="where the tokenizer lies, if not in CHECKPOINT")
    model.add_argument("--trust-remote-code", action="store_true", help="run Python files of the checkpoint")


def run(arguments: Namespace) -> None:
    """Evaluate, compare, or both, and print a table.

    Raises:
        CoverageError: what can be told before a model is opened, or files that cannot be compared.
    """
    from moe_coverage_plugin.evaluation import Results, compare

    files = [Path(file) for file in arguments.compare]
    # a file that is none is told of before hours of work
    results = dict(zip(_labels(files), map(Results.read, files), strict=True))
    if arguments.checkpoint is not None:
        if arguments.output is None:
            raise CoverageError("where to write the results is not given: add --output FILE")
        files.append(Path(arguments.output))
        labels = _labels(files)
        results = dict(zip(labels, [*results.values(), _evaluate(arguments)], strict=True))
    elif not files:
        raise CoverageError("neither a checkpoint to measure nor results to --compare are given")
    print(output.fact_lines({label: _fact(found) for label, found in results.items()}) + "\n")
    print(output.table(*compare(results)))


def _evaluate(arguments: Namespace) -> Results:
    from moe_coverage_plugin.evaluation import EvaluationOptions, LocalTask, evaluate
    from moe_coverage_plugin.evaluation.local_tasks import FIELDS

    fields = dict(map(_assignment, arguments.fields))
    local = [
        LocalTask(kind, Path(file), {name: theirs for name, theirs in fields.items() if name in FIELDS[kind]})
        for kind in FIELDS
        for file in getattr(arguments, kind)
    ]
    if unknown := [name for name in fields if not any(name in task.fields for task in local)]:
        raise CoverageError(f"--fields {unknown[0]}=... names no field of the given JSON lines: see --help for them")
    names = ("backend", "few_shot", "limit", "batch_size", "seed", "dtype", "device", "tokenizer")
    names += ("trust_remote_code", "run_unsafe_code")
    options = EvaluationOptions(
        model_args={name: _value(value) for name, value in map(_assignment, arguments.model_args)},
        **{name: getattr(arguments, name) for name in names},
    )
    asked = (arguments.checkpoint, arguments.tasks, arguments.output, options, local, arguments.include_path)
    results = evaluate(*asked)
    print(f"Wrote {arguments.output}")
    return results


def _assignment(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if not (name and equals and value):
        raise CoverageError(f"{given!r} is no assignment: write NAME=VALUE")
    return name, value


def _value(given: str) -> Any:
    import yaml

    return yaml.safe_load(given)


def _labels(files: list[Path]) -> list[str]:
    """Names of the files, or their paths where names repeat."""
    names = [file.stem for file in files]
    labels = names if len(set(names)) == len(names) else [str(file) for file in files]
    if len(set(labels)) < len(labels):
        raise CoverageError("a file of results is given twice: leave one out")
    return labels


def _fact(results: Results) -> str:
    ways = {f"{task['settings']['backend']} {task['settings']['dtype']}" for task in results.tasks.values()}
    return ", ".join([results.checkpoint, *sorted(ways)])
