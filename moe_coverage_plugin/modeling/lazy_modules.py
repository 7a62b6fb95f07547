"""Lets the toolkit's loader work where torchvision is missing."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def forget_lazy_modules() -> None:
    """Call this before ``load_quantizable_moe()`` or ``load_context()`` of llm-compressor; it changes nothing else.

    They patch classes in all modules of transformers that were imported. Without torchvision its image processors are
    there as aliases, which fail when they are looked into; they come back when they are imported again.
    """
    if find_spec("torchvision") is None:
        for name in [name for name in sys.modules if name.startswith("transformers.") and "image_processing" in name]:
            del sys.modules[name]
