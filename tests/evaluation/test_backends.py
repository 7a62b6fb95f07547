"""Metrics of lm-eval on our checkpoints, compared with metrics computed from the logits of the model."""

from __future__ import annotations

import math
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_coverage_plugin import load
from moe_coverage_plugin.evaluation import EvaluationOptions, LocalTask, evaluate
from tests.evaluation.questions import QUIZ, TEXT

pytestmark = pytest.mark.slow


def opened(path, name):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) if name == "original" else load(path)
    return model.eval(), AutoTokenizer.from_pretrained(path)


@torch.no_grad()
def loglikelihood(model, ids, start):
    """Log-likelihood of the tokens from ``start`` on, given the tokens before."""
    logprobs_TV = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return sum(float(logprobs_TV[t - 1, ids[t]]) for t in range(start, len(ids)))


@pytest.mark.parametrize("name", ["original", "pruned", "four_bits"])
def test_metrics(name, request, lines, tmp_path):
    path = request.getfixturevalue(name)
    local = [LocalTask("multiple_choice", lines("quiz", QUIZ)), LocalTask("text", lines("prose", TEXT))]
    found = evaluate(str(path), [], tmp_path / "found.json", EvaluationOptions(batch_size=3), local).tasks

    model, tokenizer = opened(path, name)
    right, right_by_byte = 0, 0
    for row in QUIZ:
        context = tokenizer(row["question"]).input_ids
        scores = [loglikelihood(model, context + tokenizer(c).input_ids, len(context)) for c in row["choices"]]
        by_byte = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        right += scores.index(max(scores)) == row["answer"]
        right_by_byte += by_byte.index(max(by_byte)) == row["answer"]
    quiz = found["quiz"]["metrics"]
    assert quiz["acc"]["value"] == right / len(QUIZ)
    assert quiz["acc_norm"]["value"] == right_by_byte / len(QUIZ)

    start = [tokenizer.bos_token_id]
    total = sum(loglikelihood(model, start + tokenizer(row["text"]).input_ids, 1) for row in TEXT)
    prose = found["prose"]["metrics"]
    words, size = (sum(map(len, parts)) for parts in zip(*((r["text"].split(), r["text"]) for r in TEXT), strict=True))
    assert prose["word_perplexity"]["value"] == pytest.approx(math.exp(-total / words), rel=1e-5)
    assert prose["byte_perplexity"]["value"] == pytest.approx(math.exp(-total / size), rel=1e-5)
    assert prose["bits_per_byte"]["value"] == pytest.approx(-total / size / math.log(2), rel=1e-5)
    assert found["quiz"]["documents"] == len(QUIZ)
    assert found["quiz"]["settings"]["dtype"] == "float32"


def test_generation(pruned, lines, tmp_path):
    """The reference answer of the first question is the last number of the output, that of the second is not."""
    model, tokenizer = opened(pruned, "pruned")
    for first in range(200, 260):
        ids = tokenizer(f"Question: w{first}\nAnswer:", return_tensors="pt").input_ids
        with torch.no_grad():
            written = tokenizer.decode(model.generate(ids, max_new_tokens=256, do_sample=False)[0, ids.shape[1] :])
        # lm-eval stops at the text of the end token, with which other tokens of this vocabulary begin
        if numbers := re.findall(r"\d+", written.split(tokenizer.eos_token)[0]):
            break
    rows = [{"question": f"w{first}", "answer": f"so #### {number}"} for number in (numbers[-1], "99999")]
    task = LocalTask("exact_match", lines("sums", rows))
    found = evaluate(str(pruned), [], tmp_path / "found.json", EvaluationOptions(batch_size=1), [task]).tasks["sums"]
    assert found["metrics"]["exact_match, flexible-extract"]["value"] == 0.5
    assert found["metrics"]["exact_match, strict-match"]["value"] == 0.0


def test_few_shot_examples_and_limit(pruned, lines, tmp_path):
    task = LocalTask("multiple_choice", lines("quiz", QUIZ))
    found = evaluate(str(pruned), [], tmp_path / "found.json", EvaluationOptions(few_shot=2, limit=3), [task]).tasks
    assert found["quiz"]["few_shot"] == [2]
    assert found["quiz"]["documents"] == 3
