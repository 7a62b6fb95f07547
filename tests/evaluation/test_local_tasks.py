"""Tasks from files of JSON lines: fields with other names, and errors."""

from __future__ import annotations

import re

import pytest

from moe_coverage_plugin import CoverageError
from moe_coverage_plugin.evaluation import EvaluationOptions, LocalTask
from moe_coverage_plugin.evaluation.local_tasks import FIELDS, TEMPLATES
from moe_coverage_plugin.evaluation.tasks import Tasks
from tests.evaluation.questions import QUIZ


def documents(local):
    (unit,) = Tasks().units([], [local], EvaluationOptions())
    return unit.spec, list(unit.spec.test_docs())


def test_every_template_has_its_fields():
    assert {file.stem for file in TEMPLATES.iterdir()} == FIELDS.keys()
    for kind, fields in FIELDS.items():
        used = set(re.findall(r"{{(\w+)}}", (TEMPLATES / f"{kind}.yaml").read_text()))
        assert used == fields.keys()


def test_fields_with_other_names(lines):
    rows = [{"query": row["question"], "choices": row["choices"], "gold": row["answer"]} for row in QUIZ]
    task, docs = documents(LocalTask("multiple_choice", lines("quiz", rows), {"question": "query", "answer": "gold"}))
    assert [task.doc_to_text(doc) for doc in docs] == [row["question"] for row in QUIZ]
    assert [task.doc_to_choice(doc) for doc in docs] == [row["choices"] for row in QUIZ]
    assert [task.doc_to_target(doc) for doc in docs] == [row["answer"] for row in QUIZ]


def test_text_is_not_changed(lines):
    texts = ["{{question}} {% if %}\n", "one\u2028two 'quoted' \"twice\" \\n", "ends in a space "]
    task, docs = documents(LocalTask("text", lines("prose", [{"text": text} for text in texts])))
    assert [task.doc_to_target(doc) for doc in docs] == texts


def test_choices_are_not_changed(lines):
    choices = ['it\'s "so"', "a\nb", "{{question}}", "\\n"]
    task, docs = documents(
        LocalTask("multiple_choice", lines("quiz", [{"question": "w5", "choices": choices, "answer": 3}]))
    )
    assert task.doc_to_choice(docs[0]) == choices


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"query": "w5", "choices": ["a", "b"], "answer": 0},
            "line 2 has no field 'question'.* question=query",
        ),
        ({"question": "w5", "choices": ["a"], "answer": 0}, "choices is .*list of two texts"),
        ({"question": "w5", "choices": "ab", "answer": 0}, "choices is 'ab'"),
        ({"question": "w5", "choices": ["a", "b"], "answer": "B"}, "answer is 'B'.*counted from 0"),
        ({"question": "w5", "choices": ["a", "b"], "answer": 2}, "answer is 2, but the choices are 0 to 1"),
        ({"question": "w5", "choices": ["a", "b"], "answer": True}, "answer is 'True'"),
        ({"question": " ", "choices": ["a", "b"], "answer": 0}, "question is ' '"),
        (["w5"], "line 2 is not a JSON object"),
    ],
)
def test_invalid_lines_are_errors(lines, row, message):
    with pytest.raises(CoverageError, match=message):
        LocalTask("multiple_choice", lines("quiz", [QUIZ[0], row])).config()


def test_unreadable_files_are_errors(tmp_path):
    with pytest.raises(CoverageError, match="cannot be read"):
        LocalTask("text", tmp_path / "none.jsonl").config()
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(CoverageError, match="has no lines"):
        LocalTask("text", tmp_path / "empty.jsonl").config()
    (tmp_path / "cut.jsonl").write_text('{"text": "w5')
    with pytest.raises(CoverageError, match="line 1 is not JSON"):
        LocalTask("text", tmp_path / "cut.jsonl").config()
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CoverageError, match="cannot be read as text"):
        LocalTask("text", tmp_path / "binary.jsonl").config()


def test_unknown_kinds_and_fields_are_errors(tmp_path):
    with pytest.raises(CoverageError, match="no tasks of kind 'essay', only multiple_choice"):
        LocalTask("essay", tmp_path)
    with pytest.raises(CoverageError, match="no field 'choice', only question, choices, answer"):
        LocalTask("multiple_choice", tmp_path, {"choice": "options"})
    with pytest.raises(CoverageError, match="'my text' is not an identifier"):
        LocalTask("text", tmp_path, {"text": "my text"})
