"""Each patch is still needed: a test that fails says that the patch can go (see the module's docstring)."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from moe_coverage_plugin.modeling.causal_mask import mark_causal_attention, unmark_causal_attention
from tests.checkpoint.runs import linear_model
from tests.modeling.traced import hidden_states, subgraphs
from tests.tiny import save_model

pytestmark = pytest.mark.slow


def looks_ahead(model) -> bool:
    """Whether another last token changes the hidden states of the first tokens by more than rounding."""
    ids = torch.arange(2, 22)[None]
    other = ids.clone()
    other[0, -1] = 300
    states = [hidden_states(model, subgraphs(model, each), each)[:, :10] for each in (ids, other)]
    return not torch.allclose(*states, rtol=0, atol=1e-3)


def test_traced_passes_are_causal_with_the_mark_only():
    model = linear_model("qwen3_moe")
    assert looks_ahead(model), "llm-compressor keeps attention causal by itself: remove modeling/causal_mask.py"
    mark_causal_attention(model)
    assert not looks_ahead(model)
    unmark_causal_attention(model)
    assert "attn_implementation" not in model.config.to_dict()


# in a process of its own, because the loader patches transformers for all models that are opened later
LOADER = """
import sys
from llmcompressor import oneshot
from llmcompressor.modeling.moe.linearize import load_quantizable_moe
from transformers import AutoModelForCausalLM
if "plugin" in sys.argv:
    import moe_coverage_plugin
with load_quantizable_moe():
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
"""


@pytest.mark.skipif(
    find_spec("torchvision") is not None, reason="torchvision is installed, and the patch does nothing"
)
def test_the_loader_works_only_without_image_processors(tmp_path):
    source = str(save_model(tmp_path, num_hidden_layers=1))
    # not in forks, which have imported the plugin
    plain, patched = (
        subprocess.run([sys.executable, "-c", LOADER, source, *plugin], capture_output=True, text=True, check=False)
        for plugin in ([], ["plugin"])
    )
    assert patched.returncode == 0, patched.stderr
    assert plain.returncode, "llm-compressor's loader works without torchvision: remove modeling/lazy_modules.py"
    assert "torchvision" in plain.stderr


CONVERSIONS = """
import sys
from llmcompressor.modeling.moe.linearize import load_quantizable_moe
from transformers import AutoModelForCausalLM, conversion_mapping
import moe_coverage_plugin
with load_quantizable_moe():
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(sorted(conversion_mapping.USER_REGISTERED_MAPPINGS))
"""


def test_the_loader_leaves_its_conversions(tmp_path):
    source = str(save_model(tmp_path, num_hidden_layers=1))
    command = [sys.executable, "-c", CONVERSIONS, source]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] != "[]", "conversions are removed: remove modeling/conversions.py"


def test_models_keep_no_record_of_missing_tensors(tmp_path):
    source = save_model(tmp_path / "model", num_hidden_layers=1)
    model = AutoModelForCausalLM.from_pretrained(source)
    kept = [name for name, value in vars(model).items() if "MISSING" in str(value) or "missing_keys" in str(value)]
    # our own record has other names
    assert not kept, "transformers keeps what was missing: remove the patch of modeling/loaded_weights.py"
