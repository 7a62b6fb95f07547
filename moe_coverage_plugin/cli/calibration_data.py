"""The calibration data of ``moe-coverage oneshot``: text of the user, text that the model writes itself, or both."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetInfo, load_from_disk
from loguru import logger
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from moe_coverage_plugin.calibration.provenance import describe_model, environment, text_provenance
from moe_coverage_plugin.calibration.text import IDS, pack
from moe_coverage_plugin.checkpoint.opening import explained
from moe_coverage_plugin.cli.early import LONGEST, OWN, text_paths
from moe_coverage_plugin.files.progress import Progress, progress_directory
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.sampling.dataset import sample_text
from moe_coverage_plugin.sampling.run import document_length


def read_data(arguments: Namespace) -> Dataset | None:
    """Return windows of token ids of the user's text, evenly spread over all of it; ``None`` if none is given.

    Raises:
        CoverageError: files that cannot be read or have too little text, or no tokenizer beside the model.
    """
    paths = text_paths(arguments)
    if not paths:
        return None
    # with the model's own text, half of the windows, rounded down
    samples = arguments.samples // (2 if OWN in arguments.data else 1)
    description = json.dumps({"text": "files", "names": [path.name for path in paths]} | _written_by_a_model(paths))
    text: Sequence[Path] | Dataset = paths
    if paths[0].is_dir():
        with explained(f"{paths[0]} is not a data set written by datasets.save_to_disk"):
            saved = load_from_disk(str(paths[0]))
        if not isinstance(saved, Dataset):
            raise CoverageError(
                f"{paths[0]} has several splits: give one of them, {paths[0] / str(next(iter(saved)))}"
            )
        if IDS in saved.column_names:
            selected = saved.select(_spread(len(saved), samples))
            if OWN in arguments.data:
                _check_lengths(selected, _length(arguments))
            return selected
        text = saved
    with explained(f"{arguments.model} has no tokenizer that can be opened"):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=False)
    ids_WS = pack(text, tokenizer, arguments.text_field, _length(arguments)).ids_WS
    return _windows(ids_WS[_spread(len(ids_WS), samples)], description)


def with_own_text(given: Dataset | None, model: PreTrainedModel, arguments: Namespace) -> Dataset:
    """Return the user's windows, and text that the model writes itself if ``--data`` names it.

    Raises:
        CoverageError: the model writes too little text that is neither loops nor duplicates.
    """
    if OWN not in arguments.data:
        assert given is not None
        return given
    number = arguments.samples - (0 if given is None else len(given))
    with explained(f"{arguments.model} has no tokenizer that can be opened"):
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, trust_remote_code=False)
    own = _own_text(model, tokenizer, arguments.output, samples=number, length=_length(arguments), seed=arguments.seed)
    if given is None:
        return own
    parts = [text_provenance(each) for each in (own, given)]
    return _windows(torch.tensor([*own[IDS], *given[IDS]]), json.dumps({"parts": parts}))


def _own_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output: str, **options: int) -> Dataset:
    """Text that the model writes itself, or that it wrote for an equal run with this output that was killed."""
    description = describe_model(model) | options | {"versions": environment()["versions"]}
    with closing(Progress(progress_directory(output), "text", description)) as progress:
        if (kept := progress.load("own")) is not None:
            logger.info(f"Going on with the {len(kept['ids_WS'])} windows of text that the model has written already")
            return _windows(kept["ids_WS"], kept["description"].numpy().tobytes().decode())
        own = sample_text(model, tokenizer, **options)
        text = torch.frombuffer(bytearray(own.info.description.encode()), dtype=torch.uint8)
        progress.save("own", {"ids_WS": torch.tensor(own[IDS]), "description": text})
    return own


def _length(arguments: Namespace) -> int:
    """Tokens of a window, which the context of the model limits.

    Raises:
        CoverageError: the user asked for more.
    """
    with explained(f"{arguments.model} cannot be opened as a model"):
        config = AutoConfig.from_pretrained(arguments.model, trust_remote_code=False)
    length = document_length(arguments.sequence_length or LONGEST, config)
    if arguments.sequence_length and length < arguments.sequence_length:
        raise CoverageError(
            f"--sequence-length is {arguments.sequence_length}, but the context of {arguments.model} has {length} "
            f"tokens: give at most {length}"
        )
    return length


def _check_lengths(given: Dataset, length: int) -> None:
    """Check that samples are as long as windows of own text, before the model writes them."""
    if other := next((len(ids) for ids in given[IDS] if len(ids) != length), None):
        raise CoverageError(
            f"the data set has samples of {other} tokens, but text that the model writes has windows of {length}: "
            f"give --sequence-length {other}"
        )


def _spread(windows: int, samples: int) -> list[int]:
    if windows < samples:
        logger.warning(f"--samples is {samples}, but the data has {windows} windows: all are used")
    return torch.linspace(0, windows - 1, min(samples, windows)).long().tolist()


def _windows(ids_WS: Tensor, description: str) -> Dataset:
    # of selected windows only: as Python integers they take over ten times the memory
    return Dataset.from_dict({IDS: ids_WS.tolist()}, info=DatasetInfo(description=description))


def _written_by_a_model(paths: Sequence[Path]) -> dict[str, Any]:
    """The provenance that ``moe-coverage sample`` writes into the first row of its file."""
    for path in paths:
        if path.suffix == ".jsonl":
            # a file that cannot be read stops the command when it is packed
            with suppress(ValueError), path.open(encoding="utf-8") as rows:
                row = json.loads(rows.readline())
                if isinstance(row, dict) and "provenance" in row:
                    return {"provenance": row["provenance"]}
    return {}
