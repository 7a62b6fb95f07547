"""Opens checkpoints with transformers alone, as a user without the plugin does.

    python stock.py CHECKPOINT ...

Prints one JSON object: for each checkpoint its logits of two fixed sequences, or the error.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)


def open_and_run(path: str, prompt: list[list[int]]) -> dict[str, object]:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        with torch.no_grad():
            logits = model.eval()(torch.tensor(prompt)).logits
    except Exception as error:  # whatever stops it
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    left = {key: sorted(map(str, value))[:3] for key, value in info.items() if value}
    return {"logits": logits.float().flatten().tolist(), "loading_info": left}


if __name__ == "__main__":
    prompt = json.loads(sys.stdin.read())
    results = {path: open_and_run(path, prompt) for path in sys.argv[1:]}
    assert "moe_coverage_plugin" not in sys.modules
    assert "llmcompressor" not in sys.modules
    print("\n" + json.dumps(results))
