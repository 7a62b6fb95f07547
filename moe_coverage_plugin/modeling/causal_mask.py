"""Keeps attention causal in passes that llm-compressor traces: a patch around llm-compressor 0.14.

The sequential pipeline traces a model under eager attention. Its tracer (``SequentialTracer.create_arg`` in
``pipelines/sequential/helpers.py``) writes each config that a traced function takes into the graph as its class and
``to_dict()``, and that leaves the implementation of attention out. Families that choose their mask function in
``forward`` then get the mask ``None``, with which eager attention also attends to later tokens and to padding.

The patch can go when the tracer keeps the implementation, or when eager attention without a mask is causal
(transformers issue 46273); ``tests/modeling/test_patches.py`` then fails.
"""

from __future__ import annotations

from transformers import PreTrainedModel


def mark_causal_attention(model: PreTrainedModel) -> None:
    """Mark the config so that a traced pass creates causal masks; undone by :func:`unmark_causal_attention`."""
    # a plain attribute with the name of the constructor's argument is in to_dict()
    # patch: causal-mask
    model.config.get_text_config().attn_implementation = "eager"


def unmark_causal_attention(model: PreTrainedModel) -> None:
    """Remove the mark, so that it is not saved."""
    model.config.get_text_config().__dict__.pop("attn_implementation", None)
