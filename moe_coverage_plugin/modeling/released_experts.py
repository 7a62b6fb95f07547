"""Opens models whose experts the toolkit makes linear after loading, without a second copy of all experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compressed_tensors.utils import patch_attr
from llmcompressor.modeling.moe import linearize
from torch.nn import Module
from transformers import PreTrainedModel


@contextmanager
def released_experts() -> Iterator[None]:
    """Let the toolkit drop the fused experts of each layer once it has copied them, for models opened in the context.

    For families whose checkpoints it can load as linear experts, nothing changes. Of others (``docs/patches.md``), it
    otherwise holds the fused experts of all layers until the last one is copied: twice the model.
    """
    find = linearize.get_non_linearized_moes

    def found(model: PreTrainedModel) -> _Released:
        return _Released(find(model))

    # patch: released-experts
    with patch_attr(linearize, "get_non_linearized_moes", found):
        yield


class _Released(list[tuple[str, Module]]):
    """A list that holds no item that an iterator has passed."""

    def __iter__(self) -> Iterator[tuple[str, Module]]:
        while self:
            yield self.pop(0)
