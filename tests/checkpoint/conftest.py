import pytest

from tests.checkpoint.runs import source


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return source(tmp_path_factory.mktemp("source") / "qwen3_moe")
