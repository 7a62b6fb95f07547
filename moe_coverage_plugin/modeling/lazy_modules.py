"""Lets llm-compressor's loader work without torchvision: a patch around llm-compressor 0.14 and transformers 5.17.

``load_quantizable_moe()`` and ``load_context()`` of llm-compressor register classes that transformers, when a model is
opened, replaces in all of its imported modules (``monkey_patching``). Without torchvision, the image processors among
these modules are lazy aliases that raise as soon as an attribute is read.

The patch can go when transformers skips modules that cannot be imported: ``tests/modeling/test_patches.py`` then
fails.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec


def unload_image_processors() -> None:
    """Unload the aliases if torchvision is missing; call this before the loaders. They return when imported again."""
    # patch: image-processors
    if find_spec("torchvision") is None:
        for name in [name for name in sys.modules if name.startswith("transformers.") and "image_processing" in name]:
            del sys.modules[name]
