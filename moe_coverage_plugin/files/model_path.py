"""Checks that models exist, within a second: before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

from moe_coverage_plugin.manifest import CoverageError

TIMEOUT = 3.0


def check_model(name: str) -> None:
    """Check that a model is a directory, in the cache of the hub, or on the hub.

    Raises:
        CoverageError: it is not.
    """
    if os.path.lexists(name) or _is_path(name):
        check_directory(name)
        return
    # in the function, because most subcommands read directories only
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            # one request: opening a model would retry for half a minute
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=TIMEOUT)
    except Exception as error:  # an invalid name, no network, no access: each has a type of its own
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
        if isinstance(error, HFValidationError):
            reason = "there is no such directory"
        elif not isinstance(error, HfHubHTTPError):
            reason = f"there is no such directory, and the hub cannot be asked: {reason}"
        raise CoverageError(
            f"{name} is not a model directory or hub name ({reason}): give the directory of a model, or OWNER/NAME of "
            "one on the hub"
        ) from error


def check_directory(name: str) -> None:
    """Check that a path is the directory of a model.

    Raises:
        CoverageError: it is not.
    """
    path = Path(name)
    try:
        if (path / "config.json").is_file():
            return
        reason = "there is no such directory"
        if os.path.lexists(path):
            reason = "it has no config.json" if path.is_dir() else "it is a file"
    except OSError as error:
        # no permission, or a name that is too long
        reason = error.strerror
    raise CoverageError(f"{name} is not a model directory ({reason}): give the directory of a model")


def _is_path(name: str) -> bool:
    """Whether a name can only be that of a directory: names on the hub have one slash at most."""
    return name.startswith((".", "~", os.sep)) or name.endswith(os.sep) or name.count(os.sep) > 1
