"""Keeps attention causal in the passes that the toolkit traces."""

from __future__ import annotations

from transformers import PreTrainedModel


def keep_causal_mask(model: PreTrainedModel) -> None:
    """Let a traced pass know which attention its mask is for; undone by :func:`forget_causal_mask`.

    The toolkit traces a model under eager attention, and writes each config that a traced function takes into the
    graph as its class and ``to_dict()``, which leaves the implementation of attention out. The mask of families that
    choose their mask function in ``forward`` is then ``None``, and eager attention without a mask looks ahead and at
    padding. An attribute under the name of the constructor's argument survives ``to_dict()``.
    """
    model.config.get_text_config().attn_implementation = "eager"


def forget_causal_mask(model: PreTrainedModel) -> None:
    """Take the attribute away again, so that it is not saved."""
    model.config.get_text_config().__dict__.pop("attn_implementation", None)
