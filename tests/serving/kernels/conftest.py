"""Fixtures that run kernels on a GPU if there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when kernels are defined, so it is set before they are imported
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    _patch_lang = interpreter._patch_lang

    def _patch_lang_once(fn: Any) -> Any:
        # the interpreter does this for a kernel, and again each time that it calls a function
        languages = [value for value in fn.__globals__.values() if value in (interpreter.tl, interpreter.tl.core)]
        again = not any(is_builtin(language.load) for language in languages)
        return interpreter._LangPatchScope() if again else _patch_lang(fn)

    # patch: tests-interpreted-language
    interpreter._patch_lang = _patch_lang_once

UNINITIALIZED = 2**30
"""An integer that is out of range for all indices."""


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialized memory with NaN or invalid indices, so that reading it changes results."""

    def poisoned(allocate):
        def allocate_and_fill(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(torch.nan)
            return tensor.fill_(UNINITIALIZED) if tensor.dtype in (torch.int32, torch.int64) else tensor

        return allocate_and_fill

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
