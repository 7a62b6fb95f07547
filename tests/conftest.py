import os

import pytest
import torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    # the tensors are tiny, and sums must not depend on how many threads share them, nor fixtures of modules on order
    torch.set_num_threads(1)


@pytest.fixture
def log():
    """Messages logged during a test, each as ``LEVEL message``."""
    # not every environment that runs a part of these tests has it
    from loguru import logger

    messages: list[str] = []
    sink = logger.add(lambda message: messages.append(str(message).rstrip()), format="{level} {message}", level="INFO")
    yield messages
    logger.remove(sink)
