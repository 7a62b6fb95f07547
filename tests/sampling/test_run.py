"""Which documents are drawn, kept and left out, with engines that draw known tokens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.options import SamplingOptions
from moe_coverage_plugin.sampling import sample
from moe_coverage_plugin.sampling.turns import chat_turns, text_turns

WORDS = ["<s>", "</s>", "<user>", "<assistant>", "<end>", *(f"w{n}" for n in range(500))]
START, END, USER, ASSISTANT, END_OF_TURN = range(5)
TEMPLATE = "{{ '<s> <user> ' + messages[0].content + ' <end> <assistant> ' }}"


def tokenizer_of(template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, eos_token="</s>", **special)


def config_of(**values: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**{"bos_token_id": None, "eos_token_id": END, "max_position_embeddings": 64} | values)


class Words:
    """Draws words at random, ends documents at random, and remembers what it was given."""

    def __init__(self, end: float = 0.05, loops: float = 0.0, same: float = 0.0):
        self.chances = end, loops, same
        self.prompts: list[list[int]] = []
        self.seeds: list[int] = []

    def __call__(self, prompts: Sequence[list[int]], stops: frozenset[int], length: int, seed: int) -> list[list[int]]:
        self.prompts += prompts
        self.seeds.append(seed)
        generator = torch.Generator().manual_seed(seed)
        return [self.document(length - len(prompt), sorted(stops), generator) for prompt in prompts]

    def document(self, room: int, stops: list[int], generator: torch.Generator) -> list[int]:
        end, loops, same = self.chances
        kind = float(torch.rand(1, generator=generator))
        if kind < loops:
            return [7, 8] * (room // 2)
        if kind < loops + same:
            return list(range(10, 10 + room))
        ids: list[int] = torch.randint(5, len(WORDS), (room,), generator=generator).tolist()
        ended = torch.rand(room, generator=generator) < end
        last = int(ended.nonzero()[0]) if bool(ended.any()) else None
        return ids if last is None else [*ids[:last], stops[0]]


@settings(deadline=None)
@given(st.integers(1, 20), st.sampled_from([0.0, 0.02, 0.3]), st.integers(0, 1000))
@example(1, 0.3, 0)  # documents of three words
def test_documents_fill_the_windows(samples: int, end: float, seed: int) -> None:
    options = SamplingOptions(samples=samples, length=32, seed=seed)
    sampled = sample(Words(end), tokenizer_of(), config_of(), options)
    assert samples * 32 <= sampled.tokens < samples * 32 + 32
    assert all(0 < len(ids) <= 32 for ids in sampled.documents)
    assert len(sampled.texts) == sampled.provenance["documents"] == len(sampled.documents)


def test_one_seed_gives_one_text() -> None:
    def draw(seed: int) -> list[str]:
        options = SamplingOptions(samples=4, length=32, seed=seed)
        return sample(Words(), tokenizer_of(), config_of(), options).texts

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_rounds_draw_with_different_seeds() -> None:
    engine = Words(end=0.5)
    sample(engine, tokenizer_of(), config_of(), SamplingOptions(samples=8, length=32))
    assert len(engine.seeds) > 1
    assert len(set(engine.seeds)) == len(engine.seeds)


def test_loops_and_duplicates_are_left_out_and_counted(log: list[str]) -> None:
    sampled = sample(Words(loops=0.3, same=0.3), tokenizer_of(), config_of(), SamplingOptions(samples=20, length=64))
    left_out = sampled.provenance["left_out"]
    assert left_out["loops"] > 0
    assert left_out["duplicates"] > 0
    assert f"{left_out['loops']} more end in loops and {left_out['duplicates']} repeat others" in "\n".join(log)
    assert len(set(sampled.texts)) == len(sampled.texts)
    assert not any("w2 w3 w2 w3 w2 w3" in text for text in sampled.texts)


@pytest.mark.parametrize("chances", [{"loops": 1.0}, {"same": 1.0}])
def test_a_model_that_writes_nothing_new_stops_soon(chances: dict[str, float]) -> None:
    engine = Words(**chances)
    with pytest.raises(CoverageError, match=r"leaves \d+ of 320 tokens: sample with temperature=1\.0"):
        sample(engine, tokenizer_of(), config_of(), SamplingOptions(samples=10, length=32))
    assert len(engine.prompts) <= 400


@pytest.mark.parametrize(
    ("special", "config", "start"),
    [
        ({"bos_token": "<s>"}, {}, START),
        ({}, {"bos_token_id": 9}, 9),
        ({}, {}, END),  # the token between documents
        ({}, {"eos_token_id": [6, END]}, END),
    ],
)
def test_plain_documents_begin_with_the_start_token(
    special: dict[str, str], config: dict[str, Any], start: int
) -> None:
    (turn,) = text_turns(tokenizer_of(**special), config_of(**config))
    assert turn.before == [start]
    assert turn.stops >= {END}
    engine = Words()
    sampled = sample(
        engine, tokenizer_of(**special), config_of(**config), SamplingOptions(samples=2, length=32, form="text")
    )
    assert all(prompt == [start] for prompt in engine.prompts)
    # a token between documents is there once
    assert all((ids[0] == start) == (start not in turn.stops) for ids in sampled.documents)


def test_a_model_without_start_and_end_is_a_clear_error() -> None:
    tokenizer = tokenizer_of()
    tokenizer.eos_token = None
    with pytest.raises(CoverageError, match="neither a start token nor an end token"):
        text_turns(tokenizer, config_of(eos_token_id=None))


def test_chats_have_both_turns_of_the_model() -> None:
    tokenizer = tokenizer_of(TEMPLATE)
    user, assistant = chat_turns(tokenizer, config_of())
    assert user.before == [START, USER]
    assert user.stops == {END, END_OF_TURN}
    assert assistant.before == [END_OF_TURN, ASSISTANT]
    assert assistant.stops == {END}
    engine = Words(end=0.2)
    sampled = sample(engine, tokenizer, config_of(), SamplingOptions(samples=8, length=64))
    assert sampled.provenance["form"] == "chat"
    complete = [ids for ids in sampled.documents if ASSISTANT in ids]
    assert complete
    for ids in complete:
        assert ids[:2] == [START, USER]
        # the template's token, not that which the model wrote in its place
        place = ids.index(ASSISTANT)
        assert ids[place - 1] == END_OF_TURN
        assert END not in ids[:place]
        assert ids.count(END_OF_TURN) == 1


@pytest.mark.parametrize(
    ("template", "options", "words"),
    [
        (None, {"form": "chat"}, "has no chat template"),
        ("{{ '<s>' }}", {}, "leaves the user's message out"),
        ("{{ '<s> ' * 70 + messages[0].content }}", {"length": 64}, "takes 70 tokens, which leaves none of 64"),
    ],
)
def test_templates_that_cannot_be_used(template: str | None, options: dict[str, Any], words: str) -> None:
    with pytest.raises(CoverageError, match=words):
        sample(Words(), tokenizer_of(template), config_of(), SamplingOptions(**options))


def test_documents_are_no_longer_than_the_context(log: list[str]) -> None:
    sampled = sample(Words(end=0), tokenizer_of(), config_of(), SamplingOptions(samples=2, length=1000))
    assert sampled.provenance["length"] == 64
    assert "has 64 tokens, fewer than 1000" in log[0]


def test_the_file_has_text_and_provenance(tmp_path: Path) -> None:
    sampled = sample(Words(), tokenizer_of(), config_of(), SamplingOptions(samples=2, length=32, seed=5), "a/model")
    sampled.write(tmp_path / "own.jsonl")
    first, *others = map(json.loads, (tmp_path / "own.jsonl").read_text().splitlines())
    assert [first["text"], *(row["text"] for row in others)] == sampled.texts
    assert [first["tokens"], *(row["tokens"] for row in others)] == [len(ids) for ids in sampled.documents]
    told = first["provenance"]
    assert (told["model"], told["seed"], told["temperature"], told["length"]) == ("a/model", 5, 1.0, 32)
