"""Field cases 2.14 and 2.16: vLLM says of every changed checkpoint what ``load`` and ``inspect`` say."""

from __future__ import annotations

import re
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from moe_coverage_plugin.manifest import CoverageError
from tests.mutations import ALL, MUTATIONS, Mutation, cases, mutated
from tests.serving.engine import ARTIFACTS, OPTIONS, checkpoint_path, open_engine, prepare_process

pytestmark = pytest.mark.slow

# vLLM waits two seconds before it reads a config again that transformers did not accept
CASES = [case for case in cases() if not case[0].toolkits]
CASES += [(mutation, mutation.bases[0]) for mutation in MUTATIONS if mutation.toolkits]
FIRST = [case for case in cases(recorded=False) if not case[0].toolkits]
OURS = f"{Path(__file__).parents[2]}/moe_coverage_plugin/"
LIMIT_S = 6.0
"""Of which transformers needs most to copy and print a config of many layers, before vLLM asks the plugin."""


def base_of(name: str) -> Path:
    return checkpoint_path(f"mutations/{name}")


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    """The first configuration of an engine imports the model's code."""
    prepare_process()
    for base in ALL:
        configure(base_of(base))


def configure(directory: Path) -> Any:
    """Do what vLLM does in the user's process before it starts an engine."""
    options = {name: value for name, value in OPTIONS.items() if name != "disable_log_stats"}
    return EngineArgs(model=str(directory), dtype="float32", **options).create_engine_config()


def check(mutation: Mutation, directory: Path) -> None:
    """Check that vLLM configures an engine, or stops soon with the sentence that the table describes."""
    start = time.process_time()
    if mutation.message is None:
        assert configure(directory) is not None
        return
    with pytest.raises(Exception) as caught:  # noqa: PT011  # its message is compared below
        configure(directory)
    assert time.process_time() - start < LIMIT_S
    # vLLM's classes of options wrap errors of hooks in their own
    ours = isinstance(caught.value, CoverageError) or "Value error, " in str(caught.value)
    if mutation.toolkits and not ours:
        # transformers or vLLM stopped by itself, not our code at a value that it did not expect
        assert not traceback.extract_tb(caught.value.__traceback__)[-1].filename.startswith(OURS), caught.value
        return
    assert ours, caught.value
    assert re.search(mutation.message, str(caught.value)) is not None, caught.value


@pytest.mark.parametrize(("mutation", "base"), CASES, ids=[f"{mutation.name}-{base}" for mutation, base in CASES])
def test_vllm_gives_the_verdict_of_the_table(mutation: Mutation, base: str, tmp_path: Path) -> None:
    check(mutation, mutated(mutation, base_of(base), tmp_path / "copy"))


@pytest.mark.parametrize(("mutation", "base"), FIRST, ids=[f"{mutation.name}-{base}" for mutation, base in FIRST])
def test_structure_alone_finds_it_in_checkpoints_without_a_record(
    mutation: Mutation, base: str, tmp_path: Path
) -> None:
    """Checkpoints of release 0.1 have no record of their contents."""
    check(mutation, mutated(mutation, base_of(base), tmp_path / "copy", recorded=False))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("nan_expert_scale", "ragged_w4a16"),
        ("no_query_scale", "padded_w4a16"),
        ("no_router", "padded"),
        ("no_output", "ragged_fp8"),
        ("twice_in_shards", "shared"),
        ("group_size_'128'", "shared_w4a16"),
        ("key_twice", "padded_w4a16"),
        ("narrower_down", "padded"),
    ],
)
def test_the_user_of_an_engine_gets_the_sentence(name: str, base: str, tmp_path: Path) -> None:
    (mutation,) = [mutation for mutation in MUTATIONS if mutation.name == name]
    assert mutation.message is not None
    with pytest.raises(ValueError, match=mutation.message):
        open_engine(mutated(mutation, base_of(base), tmp_path / "copy"))


@pytest.mark.engine
@pytest.mark.parametrize(("name", "base"), [("two_shards", "ragged_w4a16"), ("hidden_file", "ragged")])
def test_an_engine_serves_what_the_table_accepts(name: str, base: str, tmp_path: Path) -> None:
    (mutation,) = [mutation for mutation in MUTATIONS if mutation.name == name]
    llm = open_engine(mutated(mutation, base_of(base), tmp_path / "copy"))
    assert llm.generate([{"prompt_token_ids": [5, 6, 7]}], use_tqdm=False)[0].outputs[0].token_ids


def test_checkpoints_that_are_changed_have_a_record() -> None:
    assert ARTIFACTS.is_dir()
    for base in ALL:
        config = configure(base_of(base)).model_config
        entry = getattr(config.hf_config, "moe_coverage", None) or config.hf_config.quantization_config["moe_coverage"]
        assert entry["contents"]["tensors"]
