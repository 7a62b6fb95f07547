"""Opens a model to compress: unpruned ones with linear experts, pruned ones as they were saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmcompressor.modeling.moe.linearize import load_quantizable_moe
from llmcompressor.utils.dev import load_context
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_coverage_plugin.checkpoint.loading import load
from moe_coverage_plugin.files.weights import SUFFIX
from moe_coverage_plugin.manifest import CONFIG_KEY, CoverageError, Manifest
from moe_coverage_plugin.modeling.memory import free_host_memory
from moe_coverage_plugin.modeling.released_experts import released_experts

# places of weights besides those of transformers
OFFLOAD, DISK = "auto_offload", "disk"


def open_model(model: str, device_map: str | None = None, offload_folder: Path | None = None) -> PreTrainedModel:
    """Open a model with its experts as linear modules, without a second copy of them in memory.

    Args:
        model: directory or name.
        device_map: as of ``moe-coverage oneshot``; ``None``: host memory.
        offload_folder: directory for weights on disk, which must exist as long as the model.

    Raises:
        CoverageError: it cannot be opened, or host memory is too small for it.
    """
    path = Path(model)
    if path.is_dir() and Manifest.from_checkpoint(path) is not None:
        if device_map is not None:
            raise CoverageError(f"{model} has {CONFIG_KEY} and is opened on the CPU: leave out --device-map")
        return load(path)
    if device_map is None and path.is_dir():
        _check_host_memory(path)
    options: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    if device_map == DISK:
        options["device_map"] = {"": DISK}
    if offload_folder is not None:
        options["offload_folder"] = str(offload_folder)
    opener = load_context() if device_map in (OFFLOAD, DISK) else load_quantizable_moe()
    with explained(f"{model} cannot be opened as a model"), opener, released_experts():
        return AutoModelForCausalLM.from_pretrained(model, dtype="auto", trust_remote_code=False, **options)


@contextmanager
def explained(problem: str) -> Iterator[None]:
    """Turn any exception of a library that reads the user's files into a CoverageError."""
    try:
        yield
    except CoverageError:
        raise
    except Exception as error:
        raise CoverageError(f"{problem} ({type(error).__name__}: {error})") from error


def _check_host_memory(path: Path) -> None:
    """Check that weights fit into host memory; files of which pages are dropped would be read again in each pass."""
    needed, free = sum(file.stat().st_size for file in path.glob(f"*{SUFFIX}")), free_host_memory()
    if needed > free:
        raise CoverageError(
            f"the weights of {path} take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of host memory are free"
            f": give --device-map {OFFLOAD}, which leaves on disk what does not fit"
        )
