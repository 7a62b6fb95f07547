"""The OpenAI-compatible server, started for real by ``examples/serve_and_query.py`` and asked over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.serving.engine import REPOSITORY, checkpoint_path, expected_logprobs

CHECKPOINT = "ragged_w4a16"
MOST_TOKENS = 128
OPTIONS = ("--enforce-eager", "--max-model-len", MOST_TOKENS, "--max-num-seqs", 4, "--dtype", "float32")


class Server(NamedTuple):
    """A running example: what it has printed, and where it serves."""

    process: subprocess.Popen[str]
    url: str
    model: str
    printed: list[str]

    def ask(self, path: str, **question: Any) -> tuple[int, Any]:
        """Status and JSON of an answer; a POST where there is a question."""
        data = json.dumps({"model": self.model} | question).encode() if question else None
        try:
            with urlopen(Request(self.url + path, data, {"Content-Type": "application/json"}), timeout=120) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    path = checkpoint_path(CHECKPOINT, "tokenizer.json")
    script = REPOSITORY / "examples" / "serve_and_query.py"
    command = [sys.executable, script, path, "--hold", "--prompt", "w5 w6 w7", "--max-tokens", "4", *OPTIONS]
    # the other tests keep engines in their process, users do not
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    process = subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # a shell that runs the tests in the background has it ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    printed: list[str] = []
    try:
        for line in process.stdout:
            printed.append(line)
            # the last thing that it prints before it holds
            if "completion_tokens" in line:
                break
        found = re.search(r"^Serving (\S+) at (\S+),", "".join(printed), re.MULTILINE)
        assert found is not None, "".join(printed)
        yield Server(process, found[2], found[1], printed)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def test_the_example_prints_what_it_asked(server: Server) -> None:
    text = "".join(server.printed)
    assert f"prompts of up to {MOST_TOKENS} tokens" in text
    assert "'prompt_tokens': 3, 'total_tokens': 7, 'completion_tokens': 4" in text
    assert re.search(r"^w5 w6 w7\S* ?w\d+", text, re.MULTILINE)


def test_models(server: Server) -> None:
    status, answer = server.ask("/v1/models")
    assert status == 200
    [model] = answer["data"]
    assert (model["id"], model["max_model_len"]) == (str(checkpoint_path(CHECKPOINT)), MOST_TOKENS)


def test_completions(server: Server) -> None:
    question = {"prompt": "w5 w6 w7", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, answer = server.ask("/v1/completions", **question)
    assert status == 200
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    [choice] = answer["choices"]
    assert len(re.findall(r"w\d+", choice["text"])) == 8
    assert choice["finish_reason"] == "length"
    assert server.ask("/v1/completions", **question)[1]["choices"] == answer["choices"]


def test_answers_are_those_of_transformers(server: Server) -> None:
    prompt_ids, expected = expected_logprobs(checkpoint_path(CHECKPOINT), "float32")
    question = {"prompt": prompt_ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
    status, answer = server.ask("/v1/completions", **question)
    assert status == 200
    found = answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(prompt_ids)]
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"prompt": "w5 " * 2 * MOST_TOKENS, "max_tokens": 1}, str(MOST_TOKENS)),
        ({"prompt": "w5", "max_tokens": 2 * MOST_TOKENS}, str(MOST_TOKENS)),
        ({"prompt": "w5", "temperature": -1}, "temperature"),
        ({"prompt": "w5", "model": "another"}, "another"),
    ],
)
def test_a_question_that_cannot_be_answered_is_an_error_and_the_server_lives_on(
    server: Server, question: dict[str, Any], words: str
) -> None:
    status, answer = server.ask("/v1/completions", **question)
    assert 400 <= status < 500
    assert words in json.dumps(answer)
    assert server.ask("/v1/completions", prompt="w5", max_tokens=1)[0] == 200
    assert server.process.poll() is None


def test_is_stopped_by_ctrl_c(server: Server) -> None:
    """Last: nothing listens any more where it did, and the example ends well."""
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        assert client.connect_ex((host, int(port))) != 0


def test_a_server_that_does_not_start_in_time_is_told_and_stopped() -> None:
    script = REPOSITORY / "examples" / "serve_and_query.py"
    command = [sys.executable, str(script), str(checkpoint_path(CHECKPOINT)), "--wait", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "vllm serve did not start: status None" in done.stderr
