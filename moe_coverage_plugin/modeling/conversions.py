"""Conversions of weights that llm-compressor's loader registers with transformers: a patch around llm-compressor 0.14.

``load_quantizable_moe()`` leaves its conversions in place. A model of the same family that is opened in the usual way
afterwards then has random experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import conversion_mapping  # pyright: ignore[reportAttributeAccessIssue] - imported lazily


@contextmanager
def conversions_kept() -> Iterator[None]:
    """Put the conversions back that were registered before; models that were opened meanwhile cannot be saved."""
    before = conversion_mapping._checkpoint_conversion_mapping_cache
    mappings = None if before is None else dict(before)
    registered = set(conversion_mapping.USER_REGISTERED_MAPPINGS)
    try:
        yield
    finally:
        # patch: loader-conversions
        conversion_mapping._checkpoint_conversion_mapping_cache = mappings
        conversion_mapping.USER_REGISTERED_MAPPINGS.clear()
        conversion_mapping.USER_REGISTERED_MAPPINGS.update(registered)
