"""Windows of text from files and data sets, which contain each token once."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.calibration.text import pack, split
from moe_coverage_plugin.recovery.training import Order
from tests.tiny import add_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(add_tokenizer(tmp_path_factory.mktemp("tokenizer")))


DOCUMENTS = ["w5 w6 w7", "w8 w9", "", "w20 w21 w22 w23"]
# token 1 ends a document
IDS = [5, 6, 7, 1, 8, 9, 1, 20, 21, 22, 23, 1]


def test_all_file_formats_give_the_same_windows(tokenizer, tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(json.dumps({"body": document}) for document in DOCUMENTS) + "\n\n")
    files = []
    for number, document in enumerate(DOCUMENTS):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(document)
    parquet, csv = tmp_path / "[a].parquet", tmp_path / "a.csv"
    table = Dataset.from_dict({"body": DOCUMENTS})
    table.to_parquet(parquet)
    # CSV reads an empty document as a missing value
    table.filter(lambda row: row["body"]).to_csv(csv)
    for text in ([lines], files, [parquet], [csv], table, Dataset.from_dict({"input_ids": [IDS]})):
        windows = pack(text, tokenizer, "body", 4)
        assert windows.ids_WS.flatten().tolist() == IDS
        assert windows.sha256 == pack([lines], tokenizer, "body", 4).sha256
    assert pack([lines], tokenizer, "body", 5).ids_WS.flatten().tolist() == IDS[:10]


def test_the_hash_depends_on_text_and_windows(tokenizer):
    ids = torch.arange(40)
    texts = [ids.tolist(), (ids + 1).tolist()]
    hashes = {
        pack(Dataset.from_dict({"input_ids": [each]}), None, "text", length).sha256
        for each in texts
        for length in (4, 8)
    }
    assert len(hashes) == 4


def test_held_out_windows_are_not_trained_on():
    windows = pack(Dataset.from_dict({"input_ids": [list(range(80))]}), None, "text", 4)
    train, held_out = split(windows, 0.25)
    assert torch.cat([train.ids_WS, held_out.ids_WS]).flatten().tolist() == list(range(80))
    assert len(held_out.ids_WS) == 5
    assert len(split(windows, 0.001)[1].ids_WS) == 1


def test_a_data_set_without_the_field_is_an_error(tokenizer):
    with pytest.raises(CoverageError, match="no text in 'text', only body: name the column"):
        pack(Dataset.from_dict({"body": DOCUMENTS}), tokenizer, "text", 4)


def test_text_without_a_tokenizer_is_an_error():
    with pytest.raises(CoverageError, match="has no tokenizer"):
        pack(Dataset.from_dict({"text": DOCUMENTS}), None, "text", 4)


def test_every_epoch_has_each_window_once():
    order = Order(7, seed=3)
    epochs = [order.at(7 * epoch, 7 * epoch + 7) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    # a resumed run begins at any position
    assert Order(7, seed=3).at(5, 16) == [*epochs[0][5:], *epochs[1], *epochs[2][:2]]
    assert Order(7, seed=4).at(0, 7) != epochs[0]
