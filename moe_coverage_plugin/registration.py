"""Registers the modifiers with llm-compressor, which has no plugin discovery, without importing it."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

TOOLKIT = "llmcompressor"


def register_modifiers() -> None:
    """Register the modifiers now if llm-compressor is imported, otherwise as soon as it is.

    Its import takes seconds and logs to the console, so it is not imported for a command that only reads a checkpoint.
    """
    # an entry that is None blocks the import
    if sys.modules.get(TOOLKIT) is not None:
        import_module("moe_coverage_plugin.modifiers")
    else:
        # patch: modifier-registration
        sys.meta_path.insert(0, _AfterToolkit())


class _AfterToolkit(MetaPathFinder):
    """Imports our modifiers, which registers them, after llm-compressor has been imported."""

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> ModuleSpec | None:
        if fullname != TOOLKIT:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                import_module("moe_coverage_plugin.modifiers")

            spec.loader.exec_module = execute_and_register
        return spec
