"""Lets llm-compressor's loaders work without torchvision: a patch around llm-compressor 0.14 and transformers 5.17.

``load_quantizable_moe()`` and ``load_context()`` of llm-compressor register classes that transformers, when a model is
opened, replaces in all of its imported modules (``monkey_patching``). Without torchvision, the image processors among
these modules are lazy aliases that raise as soon as an attribute is read.

The patch can go when transformers skips modules that cannot be imported: ``tests/modeling/test_patches.py`` then
fails.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from importlib.util import find_spec

import transformers.modeling_utils


def unload_image_processors_before_patches() -> None:
    """Let transformers unload these aliases before it replaces classes; they return when they are imported again."""
    # the name that from_pretrained calls
    apply_patches = transformers.modeling_utils.apply_patches  # pyright: ignore[reportPrivateImportUsage]

    def unload_and_apply() -> AbstractContextManager[None]:
        for name in [name for name in sys.modules if name.startswith("transformers.") and "image_processing" in name]:
            del sys.modules[name]
        return apply_patches()

    # patch: image-processors
    if find_spec("torchvision") is None:
        transformers.modeling_utils.apply_patches = unload_and_apply  # pyright: ignore[reportPrivateImportUsage]
