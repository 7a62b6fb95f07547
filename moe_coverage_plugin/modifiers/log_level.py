"""The log level of llm-compressor's quantizers."""

from __future__ import annotations

from loguru import logger


def define_metric_level() -> None:
    """Define the level ``METRIC`` if llm-compressor has not.

    It does not if its log or its metrics are switched off (``LLM_COMPRESSOR_LOG_DISABLED=true``). Its ``GPTQModifier``
    writes at this level nonetheless and would stop, after hours of calibration.
    """
    try:
        logger.level("METRIC")
    except ValueError:
        # patch: metric-level
        logger.level("METRIC", no=38)
