"""Registers the modifiers with llm-compressor and a patch with peft, without importing either of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

TOOLKIT = "llmcompressor"
# peft imports it when it adds an adapter
PEFT_CONVERSIONS = "peft.utils.transformers_weight_conversion"


def register_modifiers() -> None:
    """Register the modifiers now if llm-compressor is imported, otherwise as soon as it is.

    Its import takes seconds and logs to the console, so it is not imported for a command that only reads a checkpoint.
    """
    # patch: modifier-registration
    _after_import(TOOLKIT, _import_modifiers)


def _import_modifiers(_toolkit: ModuleType) -> None:
    import_module("moe_coverage_plugin.modifiers")
    # only llm-compressor builds models with linear experts
    _after_import(PEFT_CONVERSIONS, import_module("moe_coverage_plugin.modeling.peft_targets").keep_linear_targets)


def _after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    # an entry that is None blocks the import
    if (module := sys.modules.get(name)) is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(MetaPathFinder):
    """Runs an action once, after a module has been imported."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]):
        self._name, self._action = name, action

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self._action(module)

            spec.loader.exec_module = execute_and_act
        return spec
