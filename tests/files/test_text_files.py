"""What is said of text before a tokenizer can be opened is what the tokenizer and the loaders say.

Field case 2.20: text that is too short, or in another column, was an error only after ten seconds of imports.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moe_coverage_plugin.calibration.text import pack
from moe_coverage_plugin.files.text_files import check_text_files, keeps_bounds, most_tokens
from moe_coverage_plugin.manifest import CoverageError

BYTES = [f"<0x{code:02X}>" for code in range(256)]
# U+FDFA is 18 characters in NFKC; U+1D160 is longer in NFC, and U+0130 in lower case
CHARACTERS = "aB9 \t\n\u00e9\u2581\ufdfa\U0001d160\u0130\u3042\U0001f600</s>\\\"',:"
ENOUGH = 100_000


def bytes_alone() -> Tokenizer:
    """As in Qwen and GPT: a token for each byte, and a space before each word."""
    alphabet = {each: number for number, each in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    built = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    built.normalizer = normalizers.NFC()
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    )
    return built


def bytes_of_unknown_characters() -> Tokenizer:
    """As in Llama and Mixtral, with no character in the vocabulary, U+2581 included."""
    vocabulary = {each: number for number, each in enumerate(["<unk>", *BYTES])}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    built.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    built.decoder = decoders.ByteFallback()
    return built


def marked_characters() -> Tokenizer:
    """Each character is a word, and each word begins with U+2581."""
    vocabulary = {each: number for number, each in enumerate(["<unk>", *BYTES])}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    built.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()])
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("", "isolated"), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    return built


def unknown_characters() -> Tokenizer:
    """As in WordPiece: a token for each word."""
    built = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return built


BUILDERS = (bytes_alone, bytes_of_unknown_characters, marked_characters, unknown_characters)


def save(built: Tokenizer, directory: Path) -> Path:
    built.add_special_tokens(["<s>", "</s>"])
    ids = [(name, built.token_to_id(name)) for name in ("<s>", "</s>")]
    built.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    PreTrainedTokenizerFast(tokenizer_object=built, eos_token="</s>").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=BUILDERS, ids=lambda build: build.__name__)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param(), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def one_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns do not depend on the tokenizer."""
    return save(bytes_alone(), tmp_path_factory.mktemp("one"))


def files_of(documents: list[str], folder: Path) -> Iterator[Path]:
    (folder / "a.txt").write_text("".join(documents), encoding="utf-8")
    rows = [{"text": document} for document in documents]
    for name, as_ascii in (("a.jsonl", True), ("b.jsonl", False)):
        (folder / name).write_text("\n".join(json.dumps(row, ensure_ascii=as_ascii) for row in rows), "utf-8")
    # a letter, because cells of digits only are not text
    Dataset.from_dict({"text": [f"w{document}" for document in documents]}).to_csv(folder / "a.csv")
    yield from (folder / name for name in ("a.txt", "a.jsonl", "b.jsonl", "a.csv"))


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents=st.lists(st.text(CHARACTERS, min_size=1, max_size=20).filter(str.strip), min_size=1, max_size=3))
def test_no_tokenizer_makes_more_tokens(directory: Path, tmp_path: Path, documents: list[str]) -> None:
    assert keeps_bounds(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for path in files_of(documents, tmp_path):
        tokens = pack([path], tokenizer, "text", 1).ids_WS.numel()
        assert tokens <= most_tokens(path, ENOUGH), path.name


def replacing(built: Tokenizer) -> None:
    built.normalizer = normalizers.Replace("a", "a" * 100)


def replacing_between_characters(built: Tokenizer) -> None:
    from tokenizers import Regex

    built.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(""), "b")])


def prepending(built: Tokenizer) -> None:
    built.normalizer = normalizers.Prepend("a" * 100)


def any_map(built: Tokenizer) -> None:
    built.normalizer = normalizers.Nmt()


@pytest.mark.parametrize("change", [replacing, replacing_between_characters, prepending, any_map])
def test_tokenizers_that_can_make_more(tmp_path: Path, change: Callable[[Tokenizer], None]) -> None:
    change(built := bytes_of_unknown_characters())
    built.save(str(tmp_path / "tokenizer.json"))
    assert not keeps_bounds(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    check_text_files([tmp_path / "a.txt"], "text", tmp_path, 1000)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(CoverageError, match=r"a\.txt has 0 tokens, fewer than one window of 1000: give more text"):
        check_text_files([tmp_path / "a.txt"], "text", tmp_path, 1000)


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"model": 1}', '{"model": {}, "normalizer": [1]}'])
def test_tokenizers_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    assert not keeps_bounds(tmp_path)


def compressed(path: Path) -> None:
    path.write_bytes(gzip.compress(b"a" * 10_000))


def archive(path: Path) -> None:
    path.write_bytes(b"PK\3\4 and so on")


def latin(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")


def rows(path: Path) -> None:
    Dataset.from_dict({"text": ["a" * 10_000]}).to_parquet(path)


@pytest.mark.parametrize(
    ("write", "name"),
    [(compressed, "a.txt"), (compressed, "a.jsonl"), (archive, "a"), (latin, "a"), (rows, "a.parquet")],
)
def test_files_whose_bytes_are_no_bound(tmp_path: Path, write: Callable[[Path], None], name: str) -> None:
    write(tmp_path / name)
    assert most_tokens(tmp_path / name, ENOUGH) == math.inf


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.parquet"])
def test_files_without_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    if name.endswith("parquet"):
        Dataset.from_dict({"text": ["a"]}).select([]).to_parquet(tmp_path / name)
    assert most_tokens(tmp_path / name, ENOUGH) == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat.jsonl", b'{"messages": [{"role": "user", "content": "w5"}]}'),
        ("other.jsonl", b'{"body": "w5"}'),
        ("number.jsonl", b'{"text": 5}'),
        ("null.jsonl", b'{"text": null}'),
        ("array.json", b'[{"body": "w5"}]'),
        ("pretty.json", b'{\n "body": "w5"\n}'),
        ("broken.jsonl", b'{"text'),
        ("other.csv", b"body,title\nw5,w6\n"),
        ("quoted.csv", b'"body\n",text\nw5,w6\n'),
        ("mark.csv", b"\xef\xbb\xbftext\nw5\n"),
        ("gap.csv", b"\ntext\nw5\n"),
        ("right.csv", b"title,text\nw5,w6\n"),
        ("right.jsonl", b'{"text": "w5"}'),
        ("plain.txt", b'{"body": "w5"}'),
    ],
)
def test_columns_are_those_of_the_loaders(one_directory: Path, tmp_path: Path, name: str, content: bytes) -> None:
    """The message is that of the loader; where that reads the file, there is none."""
    path = tmp_path / name
    path.write_bytes(content)
    early, late = (message_of(path, one_directory, check) for check in (True, False))
    assert early in (None, late)
    if name.partition(".")[0] in ("chat", "other", "number"):
        assert early is not None


def message_of(path: Path, directory: Path, early: bool) -> str | None:
    try:
        if early:
            check_text_files([path], "text", directory, 1)
        else:
            pack([path], AutoTokenizer.from_pretrained(directory), "text", 1)
    except CoverageError as error:
        return str(error)
    return None


def test_columns_of_parquet(one_directory: Path, tmp_path: Path) -> None:
    Dataset.from_dict({"body": ["a"]}).to_parquet(path := tmp_path / "a.parquet")
    assert message_of(path, one_directory, early=True) == message_of(path, one_directory, early=False)
