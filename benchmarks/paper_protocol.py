r"""Runs the protocol of the paper (arXiv 2606.18304), with one command for each row of its tables.

    python -m benchmarks.paper_protocol --model qwen3-30b-a3b --variant coverage_p50 --task gsm8k \
        --calibration c4=c4.txt gsm8k=gsm8k_train.txt code=code.txt --work paper

A row is a model, a variant (the unpruned model, or a recipe of the package) and a task. Leave out --model, --variant
or --task to run all of them in turn; --dry-run prints the commands instead. Finished rows are not run again, because
checkpoints are kept, and ``moe-coverage eval`` skips tasks that have results. At the end, a table of each model is
printed.

It needs the weights of the models. Tasks are those of lm-eval, which downloads their data: 0-shot, except MMLU
(5-shot) and GSM8K (the 8 worked examples of gsm8k_cot); MATH-500 is hendrycks_math500. HumanEval runs programs that
the model writes, so it needs --run-unsafe-code, and HF_ALLOW_CODE_EVAL=1 in the environment. DeepSeek-MoE-16B has its
own Python files, which `moe-coverage oneshot` does not run: write its checkpoints from Python to the directories that
--dry-run prints.

To calibrate on the domain of each task, give several texts, NAME=FILE, and --matched. A task is then measured on a
checkpoint that was calibrated on its domain (gsm8k for GSM8K and MATH-500, code for HumanEval, c4 for all others).
Otherwise, checkpoints are calibrated on all texts, in proportion to their sizes.

Other models, variants or questions: --model NAME=PATH, --variant RECIPE.yaml, --multiple-choice FILE.jsonl.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# the authors' configurations use Qwen3-30B-A3B-Thinking-2507 for the paper's Qwen3-30B-A3B: give it as NAME=PATH
MODELS = {
    "qwen1.5-moe-a2.7b": "Qwen/Qwen1.5-MoE-A2.7B",
    "deepseek-moe-16b": "deepseek-ai/deepseek-moe-16b-base",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
}
UNPRUNED = "unpruned"
VARIANTS = (
    UNPRUNED,
    "coverage_p25_q4",
    "coverage_p50",
    "recommended_p25_q4",
    "recommended_p50",
    "recommended_p50_q4",
)
MIX = "mix"
SCRIPT = ("-m", "moe_coverage_plugin.cli")


@dataclass(frozen=True)
class Protocol:
    """How the paper measures a task.

    Attributes:
        task: name of the task in lm-eval.
        few_shot: number of worked examples, ``None`` for the default of the task.
        domain: text to calibrate on with ``--matched``.
        runs_code: whether the task runs programs that the model writes.
    """

    task: str
    few_shot: int | None = None
    domain: str = "c4"
    runs_code: bool = False


TASKS = {
    "arc-c": Protocol("arc_challenge"),
    "arc-e": Protocol("arc_easy"),
    "hellaswag": Protocol("hellaswag"),
    "piqa": Protocol("piqa"),
    "boolq": Protocol("boolq"),
    "winogrande": Protocol("winogrande"),
    "mmlu": Protocol("mmlu", few_shot=5),
    # the task file of lm-eval contains the eight worked examples
    "gsm8k": Protocol("gsm8k_cot", domain="gsm8k"),
    "humaneval": Protocol("humaneval", domain="code", runs_code=True),
    "math500": Protocol("hendrycks_math500", domain="gsm8k"),
}


@dataclass(frozen=True)
class Row:
    """One figure of a table: model, recipe and task."""

    model: str
    source: str
    variant: str
    task: str
    corpus: str | None

    def checkpoint(self, work: Path) -> str:
        """Return the checkpoint to measure; the model itself if it is not pruned."""
        return self.source if self.variant == UNPRUNED else str(work / self.model / "checkpoints" / self._name)

    def results(self, work: Path) -> Path:
        """Return the file of the results."""
        return work / self.model / f"{self._name}.json"

    @property
    def _name(self) -> str:
        variant = Path(self.variant).stem
        return variant if self.corpus is None else f"{variant}_{self.corpus}"


def rows(arguments: Namespace) -> Iterator[Row]:
    """Yield rows by model, then variant, then task.

    Raises:
        SystemExit: if a model is unknown, or a domain has no text.
    """
    models = dict(_named(each) for each in arguments.model) if arguments.model else MODELS
    local = [Path(file).stem for file in arguments.multiple_choice]
    for model, source in models.items():
        for variant in arguments.variant or VARIANTS:
            for task in [*(arguments.task or ([] if local else TASKS)), *local]:
                yield Row(model, source, variant, task, _corpus(arguments, variant, task))


def commands(row: Row, arguments: Namespace) -> Iterator[list[str]]:
    """Yield the commands of a row: write the checkpoint, if it does not exist, and evaluate it."""
    work = Path(arguments.work)
    checkpoint = row.checkpoint(work)
    if row.variant != UNPRUNED and not Path(checkpoint, "config.json").is_file():
        yield _oneshot(row, checkpoint, arguments)
    evaluation = [*_eval(arguments), checkpoint, "--output", str(row.results(work)), "--backend", arguments.backend]
    files = {Path(file).stem: file for file in arguments.multiple_choice}
    if row.task in files:
        evaluation += ["--multiple-choice", files[row.task]]
    else:
        protocol = TASKS[row.task]
        evaluation += ["--tasks", protocol.task]
        evaluation += [] if protocol.few_shot is None else ["--few-shot", str(protocol.few_shot)]
        evaluation += ["--run-unsafe-code"] if protocol.runs_code and arguments.run_unsafe_code else []
    evaluation += [] if arguments.limit is None else ["--limit", str(arguments.limit)]
    yield [*evaluation, *arguments.eval_args]


def main(argv: Sequence[str] | None = None) -> int:
    """Run rows, or print their commands; return the status of the first command that fails."""
    arguments = _parser().parse_args(argv)
    selected = list(rows(arguments))
    for row in selected:
        for command in commands(row, arguments):
            print(f"# {row.model}, {row.variant}, {row.task}\n{shlex.join(command)}", flush=True)
            if not arguments.dry_run and (status := subprocess.run(command, check=False).returncode):
                return status
    tables: dict[str, dict[str, None]] = {}
    for row in selected:
        tables.setdefault(row.model, {})[str(row.results(Path(arguments.work)))] = None
    for files in tables.values():
        command = [*_eval(arguments), "--compare", *files]
        print(shlex.join(command), flush=True)
        if not arguments.dry_run:
            subprocess.run(command, check=True)
    return 0


def _eval(arguments: Namespace) -> list[str]:
    return [arguments.eval_python, *SCRIPT, "eval"]


def _oneshot(row: Row, checkpoint: str, arguments: Namespace) -> list[str]:
    texts = _texts(arguments)
    data = list(texts.values()) if row.corpus == MIX else [texts[str(row.corpus)]]
    command = [
        sys.executable,
        *SCRIPT,
        "oneshot",
        row.source,
        "--recipe",
        row.variant,
        "--data",
        *data,
        "--output",
        checkpoint,
    ]
    command += ["--samples", str(arguments.samples), "--sequence-length", str(arguments.sequence_length)]
    return [*command, *arguments.oneshot_args]


def _corpus(arguments: Namespace, variant: str, task: str) -> str | None:
    if variant == UNPRUNED:
        return None
    texts = _texts(arguments)
    corpus = TASKS[task].domain if arguments.matched and task in TASKS else MIX
    if not texts or (corpus != MIX and corpus not in texts):
        wanted = "NAME=FILE" if corpus == MIX else f"{corpus}=FILE"
        raise SystemExit(f"{variant} needs text to calibrate on for {task}: add --calibration {wanted}")
    return corpus


def _texts(arguments: Namespace) -> Mapping[str, str]:
    return dict(_named(each) for each in arguments.calibration)


def _named(given: str) -> tuple[str, str]:
    name, equals, value = given.partition("=")
    if equals:
        return name, value
    if name in MODELS:
        return name, MODELS[name]
    raise SystemExit(f"{given} is neither NAME=PATH nor one of {', '.join(MODELS)}")


def _parser() -> ArgumentParser:
    parser = ArgumentParser("paper_protocol", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=[], metavar="NAME[=PATH]", help=", ".join(MODELS))
    parser.add_argument("--variant", nargs="+", metavar="RECIPE", help=", ".join(VARIANTS))
    parser.add_argument("--task", nargs="+", choices=TASKS, default=[], metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--multiple-choice", nargs="+", default=[], metavar="FILE", help="questions as JSON lines")
    parser.add_argument("--calibration", nargs="+", default=[], metavar="NAME=FILE", help="text to calibrate on")
    parser.add_argument("--matched", action="store_true", help="calibrate on the domain of the task")
    parser.add_argument("--samples", type=int, default=512, help="windows of text (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=2048, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--backend", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--eval-python", default=sys.executable, help="Python of vLLM's environment, for vllm")
    parser.add_argument("--limit", type=int, help="number of documents of each task, for a trial")
    parser.add_argument("--run-unsafe-code", action="store_true", help="let HumanEval run programs of the model")
    parser.add_argument(
        "--eval-args", type=shlex.split, default=[], metavar="'...'", help="further arguments of moe-coverage eval"
    )
    parser.add_argument("--oneshot-args", type=shlex.split, default=[], metavar="'...'", help="the same of oneshot")
    parser.add_argument("--work", required=True, metavar="DIR", help="directory of checkpoints and results")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    return parser


if __name__ == "__main__":
    sys.exit(main())
