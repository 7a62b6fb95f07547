"""GPTQ with the log of llm-compressor switched off."""

from __future__ import annotations

from pathlib import Path

import pytest
from loguru import logger

from moe_coverage_plugin import LayerwiseGPTQModifier, modifiers
from moe_coverage_plugin.modifiers.log_level import define_metric_level
from tests.modifiers.harness import compress, save_tiny
from tests.modifiers.test_reconstruction_pass import SMALL, W4, many
from tests.tiny import add_tokenizer

pytestmark = pytest.mark.slow


pytestmark = pytest.mark.slow


@pytest.fixture
def no_metric_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that starts with ``LLM_COMPRESSOR_LOG_DISABLED=true``; loguru has no way to remove a level."""
    core = logger._core  # pyright: ignore[reportAttributeAccessIssue] - see above
    monkeypatch.setattr(core, "levels", {name: level for name, level in core.levels.items() if name != "METRIC"})
    monkeypatch.setattr(
        core, "levels_lookup", {name: of for name, of in core.levels_lookup.items() if name != "METRIC"}
    )


@pytest.mark.usefixtures("no_metric_level")
def test_gptq_runs(tmp_path: Path):
    with pytest.raises(ValueError, match="METRIC"):
        logger.level("METRIC")
    define_metric_level()
    source = add_tokenizer(save_tiny(tmp_path / "source", **SMALL, num_hidden_layers=1))
    compress(source, [LayerwiseGPTQModifier(**W4)], dataset=many(), batch_size=8, moe_calibrate_all_experts=False)


def test_the_package_defines_it():
    assert modifiers.define_metric_level is define_metric_level
    assert logger.level("METRIC").no == 38
