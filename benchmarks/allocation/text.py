"""Reads texts as windows of token ids, to calibrate on and to measure on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.allocation.tables import ALL_CORPORA, MIXED, OWN_ENTIRE
from moe_coverage_plugin.calibration.text import pack
from moe_coverage_plugin.manifest import CoverageError

WINDOW = 512
EVALUATION_CHARACTERS = 1_000_000


@dataclass(frozen=True)
class Source:
    """A text file with a name.

    Attributes:
        name: name of the text in results.
        path: path of the file.
        skip: number of characters at the beginning to leave out, for example those used for evaluation.
    """

    name: str
    path: Path
    skip: int = 0

    @classmethod
    def parse(cls, argument: str) -> Source:
        """Parse ``NAME=FILE`` or ``NAME=FILE@SKIP``; the default name is the file's name without suffix."""
        name, separator, rest = argument.partition("=")
        rest = rest if separator else argument
        path, at, skip = rest.rpartition("@")
        if at and skip.isdigit():
            rest = path
        return cls(name if separator else Path(rest).stem, Path(rest), int(skip) if at and skip.isdigit() else 0)


@dataclass(frozen=True)
class Windows:
    """Windows of token ids.

    Attributes:
        ids_WS: token ids ``[W, 512]`` int64.
        description: text and number of windows, for results.
    """

    ids_WS: Tensor
    description: str

    @cached_property
    def sha256(self) -> str:
        """Hash of the token ids."""
        return hashlib.sha256(self.ids_WS.numpy().tobytes()).hexdigest()


def calibration_pools(sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase) -> dict[str, Tensor]:
    """Read all windows ``[W, 512]`` of every calibration text."""
    return {source.name: _tokens(source, tokenizer)[0] for source in sources}


def draw(pools: dict[str, Tensor], corpus: str, count: int, seed: int) -> Windows:
    """Draw ``count`` different windows of one corpus, or of all corpora in equal parts.

    Raises:
        CoverageError: if a corpus has too few windows.
    """
    names = list(pools) if corpus == ALL_CORPORA else [corpus]
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for position, name in enumerate(names):
        share = count // len(names) + (position < count % len(names))
        if share > len(pools[name]):
            raise CoverageError(
                f"calibration text {name!r} has {len(pools[name])} windows of {WINDOW} tokens, but {share} are "
                "needed: lower --calibration-windows, or give more text"
            )
        drawn.append(pools[name][torch.randperm(len(pools[name]), generator=generator)[:share]])
    parts = "" if corpus != ALL_CORPORA or len(names) == 1 else f" in equal parts ({', '.join(names)})"
    label = names[0] if len(names) == 1 else corpus
    return Windows(torch.cat(drawn), f"{label}{parts}: {count} windows of {WINDOW} tokens, seed {seed}")


def draw_own(own: Windows, pools: dict[str, Tensor], corpus: str, count: int, seed: int) -> Windows:
    """Take windows of text that the model wrote.

    Args:
        own: the windows of the text.
        pools: windows of the other texts.
        corpus: one of :data:`benchmarks.allocation.tables.WRITTEN`.
        count: windows to take; of ``OWN_ENTIRE``, all are taken.
        seed: seed of the draw from the other texts.

    Raises:
        CoverageError: if there are too few.
    """
    mixed = corpus == MIXED
    wanted = len(own.ids_WS) if corpus == OWN_ENTIRE else count - count // 2 if mixed else count
    if len(own.ids_WS) < wanted:
        raise CoverageError(
            f"{own.description} has {len(own.ids_WS)} windows of {WINDOW} tokens, but {wanted} are needed: lower "
            "--calibration-windows, or sample more"
        )
    ids_WS, description = own.ids_WS[:wanted], f"{own.description}: {wanted} windows of {WINDOW} tokens, seed {seed}"
    if not mixed:
        return Windows(ids_WS, description)
    others = draw(pools, ALL_CORPORA, count - wanted, seed)
    return Windows(torch.cat([ids_WS, others.ids_WS]), f"{others.description.rpartition(',')[0]} and {description}")


def own_windows(path: Path, tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Read the file of ``moe-coverage sample`` as ``moe-coverage oneshot`` does."""
    return Windows(pack([path], tokenizer, "text", WINDOW).ids_WS, f"text of the model itself ({path.name})")


def evaluation_windows(
    sources: Sequence[Source], calibration: Sequence[Source], tokenizer: PreTrainedTokenizerBase, count: int
) -> dict[str, Windows]:
    """Read the first ``count`` windows of every evaluation text.

    Raises:
        CoverageError: if a text is shorter than a window, or a calibration text overlaps the evaluation windows.
    """
    found: dict[str, Windows] = {}
    for source in sources:
        ids_WS, ends = _tokens(source, tokenizer, EVALUATION_CHARACTERS)
        ids_WS = ids_WS[:count]
        end = source.skip + ends[len(ids_WS) - 1]
        for other in calibration:
            if other.path.resolve() == source.path.resolve() and other.skip < end:
                raise CoverageError(
                    f"calibration text {other.name!r} begins at character {other.skip} of {other.path.name}, but the "
                    f"first {end} characters are used for evaluation: give {other.name}={other.path}@{end} or a "
                    "larger number"
                )
        found[source.name] = Windows(ids_WS, f"{source.name}: the first {len(ids_WS)} windows of {WINDOW} tokens")
    return found


def _tokens(
    source: Source, tokenizer: PreTrainedTokenizerBase, characters: int | None = None
) -> tuple[Tensor, list[int]]:
    """Read windows ``[W, 512]`` of a text, and the end of each as a number of characters after ``source.skip``."""
    text = source.path.read_text(encoding="utf-8")[source.skip :][:characters]
    encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
    ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    count = len(ids) // WINDOW
    if count == 0:
        raise CoverageError(
            f"text {source.name!r} has {len(ids)} tokens after its first {source.skip} characters, but a window has "
            f"{WINDOW}: give more text"
        )
    ends = [encoded["offset_mapping"][(window + 1) * WINDOW - 1][1] for window in range(count)]
    return ids[: count * WINDOW].reshape(-1, WINDOW), ends
