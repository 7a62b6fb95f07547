"""Checks of paths on the command line that end within a second: before torch or a toolkit is imported."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from moe_coverage_plugin.cli.environment import check_toolkit, draws_by_vllm
from moe_coverage_plugin.files import tokenizer
from moe_coverage_plugin.files.atomic import check_place
from moe_coverage_plugin.files.model_path import check_directory
from moe_coverage_plugin.files.text_files import check_text_files
from moe_coverage_plugin.manifest import CONFIG_KEY, SCORES_NAME, CoverageError, Manifest, read_json

# tokens of a window of moe-coverage oneshot, if the model's limit is not less
LONGEST = 2048
# in the place of a path: text that the model writes itself
OWN = "own"
# datasets.save_to_disk writes one of them
DATA_SET_FILES = ("state.json", "dataset_dict.json")


def check_oneshot(arguments: Namespace) -> None:
    """Check the output and the data of ``moe-coverage oneshot``."""
    _check_directory_to_write(arguments.output)
    if arguments.data.count(OWN) > 1:
        raise CoverageError(f"--data has {OWN} {arguments.data.count(OWN)} times: give it once")
    if OWN in arguments.data and len(arguments.data) > 1 and arguments.samples < 2:
        raise CoverageError(f"--samples is {arguments.samples}, but {OWN} and files need at least 2: one of each")
    for path in text_paths(arguments):
        if not os.path.lexists(path):
            raise CoverageError(
                f"--data {path} does not exist: give text, JSON lines, Parquet, CSV, or a directory of datasets"
            )
        if path.is_dir() and (others := len(text_paths(arguments)) - 1):
            raise CoverageError(f"--data has a directory, {path}, and {others} more: give one data set, or files only")
        if path.is_dir() and not any((path / name).is_file() for name in DATA_SET_FILES):
            raise CoverageError(
                f"--data {path} is a directory, but is not a data set written by datasets.save_to_disk: give its "
                "files of text"
            )
        if not path.is_dir():
            check_file(path, "--data")


def text_paths(arguments: Namespace) -> list[Path]:
    """Return the files or the data set of ``--data``, without the text that the model writes itself."""
    return [Path(each) for each in arguments.data if each != OWN]


def check_oneshot_text(arguments: Namespace) -> None:
    """Check the text of ``moe-coverage oneshot``, if the model is a directory and the text is in files."""
    files, model = [path for path in text_paths(arguments) if not path.is_dir()], Path(arguments.model)
    if not model.is_dir() or not (files or OWN in arguments.data):
        return
    if not any((model / name).is_file() for name in tokenizer.FILES):
        raise CoverageError(f"{model} has no tokenizer: copy the files of one to it")
    if files:
        check_text_files(files, arguments.text_field, model, arguments.sequence_length or _least_length(model))


def check_sample(arguments: Namespace) -> None:
    """Check the output and the engine of ``moe-coverage sample``."""
    output = Path(arguments.output)
    _check_file_to_write(output)
    if output.exists():
        raise CoverageError(f"output {output} exists: name another file, or delete this one")
    engine = getattr(arguments, "engine", "auto")
    if not draws_by_vllm(engine):
        check_toolkit("sample --engine transformers")
    elif find_spec("vllm") is None:
        raise CoverageError("--engine vllm needs vLLM, which is not installed here: use vLLM's environment")


def check_finetune(arguments: Namespace) -> None:
    """Check the checkpoint, the teacher, the text and the output of ``moe-coverage finetune``."""
    for name in filter(None, (arguments.checkpoint, arguments.teacher)):
        check_directory(name)
    if Manifest.from_checkpoint(arguments.checkpoint) is None:
        raise CoverageError(
            f"{arguments.checkpoint} is not a pruned checkpoint ({CONFIG_KEY} is not in its config.json): prune the "
            "model first"
        )
    _check_files(arguments.text, "--text")
    _check_files(arguments.evaluation or (), "--evaluation")
    _check_directory_to_write(arguments.output)
    # here, because pydantic takes half a second to import
    from moe_coverage_plugin.options import RecoveryOptions

    length = getattr(arguments, "sequence_length", RecoveryOptions().sequence_length)
    place = Path(arguments.tokenizer or arguments.checkpoint)
    if not tokenizer.has_tokenizer(place):
        raise CoverageError(f"{place} has no tokenizer: give the directory of one by --tokenizer")
    for files in filter(None, (arguments.text, arguments.evaluation)):
        check_text_files([*map(Path, files)], arguments.text_field, place, length)


def check_plan(arguments: Namespace) -> None:
    """Check the score file of ``moe-coverage plan``; for the directory of a checkpoint, take its score file."""
    scores = Path(arguments.scores)
    if scores.is_dir():
        if not (scores / SCORES_NAME).is_file():
            raise CoverageError(
                f"{scores} is a directory without {SCORES_NAME}: give a checkpoint with scores, or a file that "
                "AttributionModifier(save_scores=...) wrote"
            )
        arguments.scores = str(scores / SCORES_NAME)
    elif not os.path.lexists(scores):
        raise CoverageError(
            f"there is no score file {scores}: give the {SCORES_NAME} of a checkpoint, or a file that "
            "AttributionModifier(save_scores=...) wrote"
        )
    else:
        check_file(scores, "score file")
    _check_written_files(arguments)


def check_inspect(arguments: Namespace) -> None:
    """Check the outputs of ``moe-coverage inspect``."""
    _check_written_files(arguments)


def check_eval(arguments: Namespace) -> None:
    """Check the files of ``moe-coverage eval``."""
    _check_files(arguments.compare, "--compare")
    if arguments.output is not None:
        _check_file_to_write(arguments.output)


def check_pareto(arguments: Namespace) -> None:
    """Check the output of ``moe-coverage pareto``."""
    _check_file_to_write(arguments.output)


CHECKS: Mapping[str, Callable[[Namespace], None]] = {
    "oneshot": check_oneshot,
    "sample": check_sample,
    "finetune": check_finetune,
    "plan": check_plan,
    "inspect": check_inspect,
    "eval": check_eval,
    "pareto": check_pareto,
}
"""By subcommand. Each raises CoverageError."""


def check_file(path: Path, what: str) -> None:
    """Check that a file can be read.

    Raises:
        CoverageError: it cannot.
    """
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise CoverageError(f"{what} {path} cannot be read ({error.strerror}): give another file") from error


def _check_files(names: Iterable[str], option: str) -> None:
    for path in map(Path, names):
        if path.is_dir():
            raise CoverageError(f"{option} {path} is a directory: give its files")
        check_file(path, option)


def _least_length(model: Path) -> int:
    """Return the tokens of a window by default, or less: a model can have several configs, each with a limit."""
    config = read_json(model / "config.json")
    configs = [config, *(each for each in config.values() if isinstance(each, dict))]
    limits = [each.get("max_position_embeddings") for each in configs]
    return min([LONGEST, *(limit for limit in limits if isinstance(limit, int))]) if any(limits) else 1


def _check_directory_to_write(name: str) -> None:
    path = Path(name)
    if os.path.lexists(path) and not path.is_dir():
        raise CoverageError(f"output {path} exists and is not a directory: choose another one")
    check_place(path)


def _check_file_to_write(name: str | Path) -> None:
    path = Path(name)
    if path.is_dir():
        raise CoverageError(f"{path} cannot be written (it is a directory): name a file in it")
    check_place(path)


def _check_written_files(arguments: Namespace) -> None:
    if arguments.json is not None:
        _check_file_to_write(arguments.json)
    if arguments.pictures is not None:
        _check_directory_to_write(arguments.pictures)
