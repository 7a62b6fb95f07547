"""Paths of the recipes: in ``recipes/`` of the repository, or inside an installed package."""

from __future__ import annotations

from pathlib import Path

from moe_coverage_plugin.manifest import CoverageError

_PACKAGE = Path(__file__).parent


def recipe_path(name: str) -> str:
    """Return the path of a recipe of the package, for ``oneshot(recipe=...)``.

    Args:
        name: with or without ``.yaml``, for instance ``coverage_p25_q4``.

    Raises:
        CoverageError: there is no such recipe; the message lists those that exist.
    """
    installed, repository = _PACKAGE / "recipes", _PACKAGE.parent / "recipes"
    folder = installed if installed.is_dir() else repository
    path = folder / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        raise CoverageError(f"there is no recipe {name!r}: known are {known}")
    return str(path)
