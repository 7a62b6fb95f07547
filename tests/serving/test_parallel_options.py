"""Options of parallelism that cannot work with experts of unequal width stop in the user's process."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from moe_coverage_plugin.cli.checkpoint import read_checkpoint
from moe_coverage_plugin.cli.expert_ranks import _bits, _stored_experts
from moe_coverage_plugin.manifest import CoverageError
from moe_coverage_plugin.serving import compat
from moe_coverage_plugin.serving.config import CoverageConfig
from moe_coverage_plugin.serving.parallel_options import (
    check_balancing,
    check_data_parallel,
    check_expert_parallel,
    check_stock_experts,
)
from tests.serving.engine import OPTIONS, checkpoint_path


def configure(name: str, **options: Any) -> None:
    """Everything that vLLM does in the user's process before it starts another process."""
    arguments: dict[str, Any] = OPTIONS | {"distributed_executor_backend": "mp", "tensor_parallel_size": 2} | options
    EngineArgs(model=str(checkpoint_path(name)), enable_expert_parallel=True, **arguments).create_engine_config()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ragged_fp32", {"expert_placement_strategy": "round_robin"}, r"is 'round_robin', .* placed by their widths"),
        ("ragged_fp32", {"enable_ep_weight_filter": True}, r"enable_ep_weight_filter is set, .* serve without"),
        ("padded_fp32", {}, r"kernels of this build .* read experts of other ranks .* or on a GPU"),
    ],
)
def test_before_a_process_starts(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(name, **options)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["ragged_fp32", "ragged_shared_fp32", "padded_w4a16"])
def test_expert_parallel_ranks(name: str) -> None:
    configure(name)


@pytest.mark.engine
@pytest.mark.parametrize("name", ["ragged_fp32", "ragged_fp8_exact", "ragged_asymmetric", "ragged_float8_attention"])
def test_inspect_and_the_engine_place_by_equal_loads(name: str) -> None:
    """The command reads how experts are stored from the files, an engine from the config."""
    checkpoint = read_checkpoint(checkpoint_path(name))
    stored = _stored_experts(checkpoint)
    schemes = CoverageConfig.from_config(dict(checkpoint.quantization)).schemes
    assert {layer: _bits(checkpoint, experts) for layer, experts in stored.items()} == {
        layer: scheme.bits for layer, scheme in schemes.items()
    }


@pytest.mark.engine
def test_one_rank_holds_all_experts() -> None:
    """vLLM ignores the option then."""
    configure("padded_fp32", tensor_parallel_size=1)


def test_options_that_need_more_than_two_ranks_or_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CoverageError, match=r"enable_eplb is set, .* serve without --enable-eplb"):
        check_balancing(True)
    with pytest.raises(CoverageError, match=r"prefill_context_parallel_size is 2 with enable_expert_parallel, "):
        check_expert_parallel("linear", False, 2)
    with pytest.raises(CoverageError, match=r"all2all_backend is 'deepep_low_latency', .* without --all2all-backend"):
        check_data_parallel(2, "deepep_low_latency")
    monkeypatch.setattr(compat, "lacks_expert_parallel_moe", lambda: False)
    check_stock_experts(True, 2)
    monkeypatch.setattr(compat, "lacks_data_parallel_moe", lambda: False)
    check_data_parallel(2, "allgather_reducescatter")
