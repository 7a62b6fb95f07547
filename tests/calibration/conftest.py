"""What the toolkit and we log during a test."""

from __future__ import annotations

import pytest
from loguru import logger


@pytest.fixture
def log():
    """Messages logged during a test, each as ``LEVEL message``."""
    messages: list[str] = []
    sink = logger.add(lambda message: messages.append(str(message).rstrip()), format="{level} {message}", level="INFO")
    yield messages
    logger.remove(sink)
