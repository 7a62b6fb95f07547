"""The ``oneshot`` run around a modifier: its recipe, its arguments and its pipeline."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from llmcompressor.core import active_session
from llmcompressor.entrypoints.oneshot import Oneshot
from llmcompressor.modifiers import Modifier
from transformers import PreTrainedModel

from moe_coverage_plugin.manifest import CoverageError, Manifest
from moe_coverage_plugin.modifiers.early_checks import check_run
from moe_coverage_plugin.options.base import Options
from moe_coverage_plugin.options.recipes import check_overrides, order_error

M = TypeVar("M", bound=Modifier)
# noted while recipes initialize: later, the pass of one modifier hides the others
_recipes: WeakKeyDictionary[Oneshot, list[Modifier]] = WeakKeyDictionary()


def running_oneshot() -> Oneshot | None:
    """Return the ``oneshot`` call in progress, ``None`` if a session is driven by hand.

    A session has neither the output directory nor the pipeline nor the tokenizer, and errors in them must be found
    before calibration. The call stack is read because that needs no change of the toolkit.
    """
    # patch: oneshot-frame
    frame = sys._getframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), Oneshot):
            return found
        frame = frame.f_back
    return None


def accept_loaded_models() -> None:
    """Let ``oneshot`` take models that ``load`` opened, whose weights are decompressed, and check its arguments.

    llm-compressor reads the file that a model was loaded from, and stops if its quantization method is of others.
    """
    validate_model = Oneshot.validate_model

    @wraps(validate_model)
    def validate_other_models(self: Oneshot, model: PreTrainedModel) -> None:
        check_run(self)
        file = Path(model.config.name_or_path or "") / "config.json"
        # only load() opens such a checkpoint
        if not file.is_file() or Manifest.from_checkpoint(file.parent) is None:
            validate_model(self, model)

    # patch: loaded-models
    Oneshot.validate_model = validate_other_models


def is_ours(modifier: Modifier) -> bool:
    """Whether a modifier is of this package, or of a subclass."""
    return any(cls.__module__.startswith(f"{__package__}.") for cls in type(modifier).__mro__)


def recipe_around(modifier: Modifier) -> tuple[list[Modifier], list[Modifier]]:
    """Return the recipe's modifiers before and after ``modifier``.

    Only while a recipe initializes: later, the pass of one modifier hides the others.
    """
    modifiers = active_session().lifecycle.recipe.modifiers
    index = next(i for i, other in enumerate(modifiers) if other is modifier)
    return modifiers[:index], modifiers[index + 1 :]


def recipe_of(run: Oneshot) -> list[Modifier]:
    """Return the recipe of a run whose modifiers are initialized."""
    return _recipes[run]


def predecessor(modifier: Modifier, *kinds: type[M]) -> M:
    """Return the last modifier of one of ``kinds`` before ``modifier`` in the recipe.

    Raises:
        CoverageError: there is none.
    """
    before, after = recipe_around(modifier)
    for other in reversed(before):
        if isinstance(other, kinds):
            return other
    wanted = " or ".join(kind.__name__ for kind in kinds)
    raise order_error(type(modifier).__name__, wanted, any(isinstance(other, kinds) for other in after))


def prepare(modifier: Modifier) -> None:
    """Apply ``recipe_args`` to a modifier of this package and check the pipeline, when a recipe initializes.

    Raises:
        CoverageError: the pipeline uses no data; see also :func:`apply_recipe_args` and :func:`refuse_shared_pass`.
    """
    if isinstance(modifier, Options):
        apply_recipe_args(modifier)
    run = running_oneshot()
    if run is not None:
        _recipes[run] = list(active_session().lifecycle.recipe.modifiers)
    pipeline = str(run.dataset_args.pipeline).lower() if run is not None else "independent"
    if pipeline == "datafree":
        raise CoverageError(
            f"{type(modifier).__name__} needs calibration data, which pipeline='datafree' does not use: use "
            'pipeline="independent", the default of oneshot'
        )
    if pipeline != "independent":
        refuse_shared_pass(modifier)


def refuse_shared_pass(modifier: Modifier) -> None:
    """Stop if modifiers of others share a calibration pass with ours.

    A quantizer in the same pass would be calibrated on experts before their channels are removed.

    Raises:
        CoverageError: names the other modifiers.
    """
    modifiers = active_session().lifecycle.recipe.modifiers
    others = [type(other).__name__ for other in modifiers if not is_ours(other)]
    if others:
        raise CoverageError(
            f"{type(modifier).__name__} shares one calibration pass with {', '.join(others)}, which would be "
            'calibrated on experts of the old width: give every modifier its own with pipeline="independent", the '
            "default of oneshot"
        )


def apply_recipe_args(modifier: Modifier) -> None:
    """Let ``oneshot(recipe_args=...)`` override fields of a pruning modifier by name.

    The toolkit accepts the argument but does not apply it, so a name that no pruning modifier has is an error.

    Raises:
        CoverageError: an unknown name, or a value that the field does not accept.
    """
    recipe = active_session().lifecycle.recipe
    inherited = set(Modifier.model_fields)
    pruning = [type(other) for other in recipe.modifiers if isinstance(other, Options)]
    check_overrides(recipe.args, {name for each in pruning for name in each.model_fields} - inherited)
    checked = overridden(modifier, recipe.args)
    # patch: recipe-args
    for name in set(recipe.args) & set(type(modifier).model_fields):
        setattr(modifier, name, getattr(checked, name))


def overridden(modifier: M, values: Mapping[str, Any]) -> M:
    """Return a modifier like this one, but with other values for fields that it has.

    Args:
        modifier: a pruning modifier.
        values: by name; those of other modifiers are passed over.

    Raises:
        CoverageError: a value that the field does not accept.
    """
    given = modifier.model_dump(include=modifier.model_fields_set - set(Modifier.model_fields))
    return type(modifier)(**given | {name: values[name] for name in values if name in type(modifier).model_fields})
