"""What is installed here: llm-compressor and vLLM need separate environments."""

from __future__ import annotations

from importlib.util import find_spec

from moe_coverage_plugin.installation import how_to_install
from moe_coverage_plugin.manifest import CoverageError

TOOLKIT = "llmcompressor"
# packages that come with llm-compressor, not with vLLM
COMPRESSING = (TOOLKIT, "accelerate", "peft")


def check_toolkit(command: str) -> None:
    """Check that llm-compressor is installed, without importing it.

    Raises:
        CoverageError: it is not.
    """
    if find_spec(TOOLKIT) is None:
        raise CoverageError(f"moe-coverage {command} needs llm-compressor: {not_installed(TOOLKIT)}")


def draws_by_vllm(engine: str) -> bool:
    """Return whether vLLM draws text with this value of ``--engine``."""
    return engine == "vllm" or (engine == "auto" and find_spec("vllm") is not None)


def not_installed(package: str) -> str:
    """Return a message with the command that installs a package where it belongs."""
    if find_spec("vllm") is None:
        return f"{package} is not installed here: {how_to_install('compress')}"
    if package in COMPRESSING:
        return (
            f"{package} is not installed here, in vLLM's environment, and would replace packages that vLLM needs: "
            "install it in an environment of its own, python -m venv compressing && "
            f"{how_to_install('compress', pip='compressing/bin/pip')}"
        )
    return f"{package} is not installed here: pip install {package}"
