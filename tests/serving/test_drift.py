"""The names and signatures of vLLM that the serving half uses, against what this environment has."""

from tests.drift.check import check_half, open_sources


def test_installed() -> None:
    done = check_half(open_sources({}), "vllm")
    assert done.moved == []
    assert done.counts["imports"] > 0
