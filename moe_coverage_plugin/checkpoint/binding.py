"""Makes ``save_pretrained`` of pruned models write pruned checkpoints, also of copies of such models.

The record of the pruning is an attribute of the model, so ``copy.deepcopy`` and ``copy.copy`` take it along.
``save_pretrained`` of the class looks for it in the model that is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

from llmcompressor.transformers.compression.compressed_tensors_utils import modify_save_pretrained
from transformers import PreTrainedModel

RECORD = "_pruning_record"
METHOD = "save_pretrained"

Save = Callable[..., None]


class SavePretrained:
    """``save_pretrained`` of a class some of whose models are pruned."""

    def __init__(self, original: Any, save: Save):
        """Wrap the method of the class.

        Args:
            original: the function that saves other models.
            save: called with a pruned model, its record, the toolkit's method for it, and the user's arguments.
        """
        self._original, self._save = original, save
        update_wrapper(self, original)

    def __get__(self, model: PreTrainedModel | None, owner: type | None = None) -> Any:
        if model is None:
            return self
        if RECORD not in vars(model):
            return self._original.__get__(model, owner)
        bound = partial(self, model)
        # the toolkit does not replace a method with this mark when the model enters oneshot again
        bound._overridden = True  # type: ignore[attr-defined]
        bound._record = vars(model)[RECORD]  # type: ignore[attr-defined]
        return bound

    def __call__(self, model: PreTrainedModel, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save a model, pruned or not."""
        # an adapter that transformers added is saved alone
        if RECORD not in vars(model) or getattr(model, "_hf_peft_config_loaded", False):
            return self._original(model, save_directory, *args, **kwargs)
        # without its record the model is saved by the original methods of its class and of the classes above
        record = vars(model).pop(RECORD)
        try:
            self._save(model, record, _toolkit_method(model, self._original), save_directory, *args, **kwargs)
        finally:
            vars(model)[RECORD] = record


def bind(model_class: type, save: Save) -> None:
    """Let ``save_pretrained`` of a class look for records of prunings in the models that it saves."""
    definer = next(each for each in model_class.__mro__ if METHOD in vars(each))
    original = vars(definer)[METHOD]
    if not isinstance(original, SavePretrained):
        # patch: save-pretrained
        setattr(definer, METHOD, SavePretrained(original, save))


def _toolkit_method(model: PreTrainedModel, original: Any) -> Save:
    """Return llm-compressor's ``save_pretrained`` for a model, which it binds to the object that it is given."""
    attributes = vars(model)
    previous = attributes.pop(METHOD, None)
    attributes[METHOD] = MethodType(original, model)
    try:
        modify_save_pretrained(model)
        return attributes[METHOD]
    finally:
        del attributes[METHOD]
        if previous is not None:
            attributes[METHOD] = previous
