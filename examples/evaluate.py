"""Measure checkpoints by lm-eval on text and questions of your own. Runs in the compressing environment.

python examples/evaluate.py benchmarks/testbed/mini_moe out/pruned out/pruned_q4
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from random import Random

from tabulate import tabulate

from moe_coverage_plugin.evaluation import EvaluationOptions, LocalTask, compare, evaluate

MINI_MOE = Path(__file__).parents[1] / "benchmarks" / "testbed" / "mini_moe"
CHARACTERS = 400

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoints", nargs="+", help="directories, pruned or not; each is compared with the first")
parser.add_argument("--data", type=Path, default=MINI_MOE / "heldout.txt", help="text to measure on")
parser.add_argument("--documents", type=int, default=32, help="how many pieces of it")
parser.add_argument("--output", type=Path, default=Path("out/evaluation"), help="directory of the results")
args = parser.parse_args()
args.output.mkdir(parents=True, exist_ok=True)

# JSON lines: documents for perplexity, and multiple-choice questions. Here, the correct choice continues a piece of
# text; in the wrong choices, two neighbouring words are swapped.
text = args.data.read_text(encoding="utf-8")
pieces = [text[begin : begin + CHARACTERS] for begin in range(0, len(text), CHARACTERS)][: args.documents]
random = Random(0)
questions = []
for piece in pieces:
    question, words = piece[: CHARACTERS // 2], re.split(r"(?<=\s)(?=\S)", piece[CHARACTERS // 2 :])
    choices = [words]
    for at in random.sample(range(len(words) - 1), 2):
        choices.append([*words[:at], words[at + 1], words[at], *words[at + 2 :]])
    questions.append({"question": question, "choices": ["".join(each) for each in choices], "answer": 0})
for name, lines in (("prose", [{"text": piece} for piece in pieces]), ("quiz", questions)):
    (args.output / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
tasks = [LocalTask("text", args.output / "prose.jsonl"), LocalTask("multiple_choice", args.output / "quiz.jsonl")]

results = {}
for checkpoint in args.checkpoints:
    name = Path(checkpoint).name
    # names of lm-eval's own tasks go into the empty list; tasks with results in the file are not run again
    results[name] = evaluate(checkpoint, [], args.output / f"{name}.json", EvaluationOptions(backend="hf"), tasks)
headers, rows = compare(results)
print(tabulate(rows, headers, disable_numparse=True))
