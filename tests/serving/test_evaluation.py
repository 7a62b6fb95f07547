"""``moe-coverage eval --backend vllm`` without llm-compressor gives the figure of transformers."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from moe_coverage_plugin.cli import main
from tests.serving.engine import checkpoint_path, expected_logprobs

pytestmark = pytest.mark.engine

CONTEXT, TOLERANCE = 56, 2e-4
TASK = """
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{answer}}}}"
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
"""
ENGINE = ("max_model_len=128", "enforce_eager=true", "max_num_seqs=4", "kv_cache_memory_bytes=67108864")
ENGINE += ("distributed_executor_backend=uni",)


def _tokenizer(directory: Path) -> None:
    """One token for each word; unlike in the checkpoint's tokenizer, no special token is a part of another token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, 512)}, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(directory)


def test_figure_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    path = checkpoint_path("ragged_w4a16", "tokenizer.json")
    prompt_ids, logprobs = expected_logprobs(path)
    words = [f"w{token}" for token in prompt_ids]
    _tokenizer(tmp_path / "tokenizer")
    row = {"question": " ".join(words[:CONTEXT]), "answer": " ".join(words[CONTEXT:])}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "words.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    output = tmp_path / "found.json"
    task = ["--tokenizer", str(tmp_path / "tokenizer"), "--tasks", "words", "--include-path", str(tmp_path / "tasks")]
    arguments = ["eval", str(path), *task, "--output", str(output), "--backend", "vllm", "--model-args", *ENGINE]
    assert main(arguments) == 0, capsys.readouterr().err

    found = json.loads(output.read_text())["tasks"]["words"]
    perplexity = found["metrics"]["perplexity"]["value"]
    # of one document, whose continuation has several tokens
    assert -math.log(perplexity) == pytest.approx(sum(logprobs[CONTEXT - 1 :]), abs=TOLERANCE)
    assert found["settings"]["dtype"] == "float32"
    assert found["versions"]["vllm"]
    assert importlib.util.find_spec("llmcompressor") is None
    assert (
        not {f"moe_coverage_plugin.{half}" for half in ("modeling", "calibration", "checkpoint.saving", "modifiers")}
        & sys.modules.keys()
    )
