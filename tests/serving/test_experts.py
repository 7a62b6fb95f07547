"""What needs no engine of the method that vLLM calls; the rest is in ``test_engine.py``."""

from __future__ import annotations

from moe_coverage_plugin.serving.experts import announce_slow_path


def test_slow_path_is_told_once_per_reason(log: list[str]) -> None:
    for reason in ("no card", "no card", "odd groups", "no card"):
        announce_slow_path(reason)
    told = [message for message in log if "plain torch" in message]
    assert [message.rpartition(": ")[2] for message in told] == ["no card", "odd groups"]
    assert all(message.startswith("WARNING") for message in told)
