"""The OpenAI-compatible server over two ranks, started by ``examples/serve_and_query.py`` and queried over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.serving.adapters import make_adapter
from tests.serving.engine import REPOSITORY, checkpoint_path, expected_logprobs

pytestmark = pytest.mark.engine

CHECKPOINT = "ragged_w4a16_a64"
MOST_TOKENS = 128
OPTIONS = ("--enforce-eager", "--max-model-len", MOST_TOKENS, "--max-num-seqs", 4, "--dtype", "float32")
ADAPTER = "attention"


class Server(NamedTuple):
    """A running example, what it has printed, and its address."""

    process: subprocess.Popen[str]
    url: str
    model: str
    printed: list[str]

    def query(self, path: str, **request: Any) -> tuple[int, Any]:
        """Status and JSON of a response; the method is POST if there is a request."""
        data = json.dumps({"model": self.model} | request).encode() if request else None
        try:
            with urlopen(
                Request(self.url + path, data, {"Content-Type": "application/json"}), timeout=120
            ) as response:
                return response.status, json.load(response)
        except HTTPError as error:
            return error.code, json.load(error)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an adapter of attention, and of one of experts, too."""
    path = tmp_path_factory.mktemp("adapters")
    make_adapter(checkpoint_path(CHECKPOINT), path / ADAPTER, ("q_proj", "v_proj"))
    make_adapter(checkpoint_path(CHECKPOINT), path / "experts", ("q_proj", "experts.2.up_proj"))
    return path


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Server]:
    path = checkpoint_path(CHECKPOINT, "tokenizer.json")
    script = REPOSITORY / "examples" / "serve_and_query.py"
    command = [sys.executable, script, path, "--hold", "--prompt", "w5 w6 w7", "--max-tokens", "4", *OPTIONS]
    # Case 6, case 30: two ranks, in interpreters of their own, find the plugin and give the output of one
    command += ["--tensor-parallel-size", "2"]
    command += ["--enable-lora", "--lora-modules", f"{ADAPTER}={directory / ADAPTER}"]
    # other tests keep engines in their process, but users do not
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    cores = sorted(os.sched_getaffinity(0))
    environment["VLLM_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
    # it would compile two operations of vLLM, for eighteen seconds
    environment["TORCHDYNAMO_DISABLE"] = "1"
    process = subprocess.Popen(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # a shell that runs the tests in the background makes them ignore the signal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    printed: list[str] = []
    try:
        for line in process.stdout:
            printed.append(line)
            # the last line that it prints before it waits
            if "completion_tokens" in line:
                break
        found = re.search(r"^Serving (\S+) at (\S+),", "".join(printed), re.MULTILINE)
        assert found is not None, "".join(printed)
        yield Server(process, found[2], found[1], printed)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def test_the_example_prints_its_query(server: Server) -> None:
    text = "".join(server.printed)
    assert f"prompts of up to {MOST_TOKENS} tokens" in text
    assert "'prompt_tokens': 3, 'total_tokens': 7, 'completion_tokens': 4" in text
    assert re.search(r"^w5 w6 w7\S* ?w\d+", text, re.MULTILINE)


def test_models(server: Server) -> None:
    status, response = server.query("/v1/models")
    assert status == 200
    model, adapter = response["data"]
    assert (model["id"], model["max_model_len"]) == (str(checkpoint_path(CHECKPOINT)), MOST_TOKENS)
    assert (adapter["id"], adapter["parent"]) == (ADAPTER, model["id"])


def test_completions(server: Server) -> None:
    request = {"prompt": "w5 w6 w7", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, response = server.query("/v1/completions", **request)
    assert status == 200
    assert response["usage"] == response["usage"] | {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    [choice] = response["choices"]
    assert len(re.findall(r"w\d+", choice["text"])) == 8
    assert choice["finish_reason"] == "length"
    assert server.query("/v1/completions", **request)[1]["choices"] == response["choices"]


def prompt_logprobs(server: Server, **request: Any) -> tuple[list[float], list[float]]:
    """Log-probabilities of a prompt's tokens, and those of transformers without an adapter."""
    prompt_ids, expected = expected_logprobs(checkpoint_path(CHECKPOINT), "float32")
    request |= {"prompt": prompt_ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0}
    status, response = server.query("/v1/completions", **request)
    assert status == 200
    return response["choices"][0]["logprobs"]["token_logprobs"][1 : len(prompt_ids)], expected


def test_responses_are_those_of_transformers(server: Server) -> None:
    found, expected = prompt_logprobs(server)
    assert found == pytest.approx(expected, abs=1e-4)


def test_an_adapter_of_attention(server: Server) -> None:
    """Its results are compared with those of the merged model in ``test_adapters``."""
    found, without = prompt_logprobs(server, model=ADAPTER)
    assert median(abs(a - b) for a, b in zip(found, without, strict=True)) > 0.1
    assert prompt_logprobs(server)[0] == pytest.approx(without, abs=1e-4)


def test_an_adapter_of_experts_is_an_error_and_the_server_goes_on(server: Server, directory: Path) -> None:
    request = {"lora_name": "experts", "lora_path": str(directory / "experts")}
    status, response = server.query("/v1/load_lora_adapter", **request)
    assert status >= 400
    assert "tensors of experts" in json.dumps(response)
    assert "merge it with peft" in json.dumps(response)
    assert server.query("/v1/completions", prompt="w5", max_tokens=1)[0] == 200


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ({"prompt": "w5 " * 2 * MOST_TOKENS, "max_tokens": 1}, str(MOST_TOKENS)),
        ({"prompt": "w5", "max_tokens": 2 * MOST_TOKENS}, str(MOST_TOKENS)),
        ({"prompt": "w5", "temperature": -1}, "temperature"),
        ({"prompt": "w5", "model": "another"}, "another"),
    ],
)
def test_an_invalid_request_is_an_error_and_the_server_goes_on(
    server: Server, request_: dict[str, Any], text: str
) -> None:
    status, response = server.query("/v1/completions", **request_)
    assert 400 <= status < 500
    assert text in json.dumps(response)
    assert server.query("/v1/completions", prompt="w5", max_tokens=1)[0] == 200
    assert server.process.poll() is None


def test_is_stopped_by_ctrl_c(server: Server) -> None:
    """The last test: nothing listens at the address any more, and the example exits with status 0."""
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        assert client.connect_ex((host, int(port))) != 0


def test_a_server_that_does_not_start_in_time_is_reported_and_stopped() -> None:
    script = REPOSITORY / "examples" / "serve_and_query.py"
    command = [sys.executable, str(script), str(checkpoint_path(CHECKPOINT)), "--wait", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert "vllm serve did not start: status None" in done.stderr
