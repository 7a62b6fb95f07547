"""Checks that other packages still have the names that we use, and that their functions accept our arguments.

    python -m tests.drift.check                              installed packages
    python -m tests.drift.check --sources vllm=/unpacked     a package that is not installed, by its files

The packages are llm-compressor, vLLM, compressed-tensors and transformers; they are not imported. The exit status is 1
if a name moved or a signature changed.
"""

from __future__ import annotations

import argparse
import ast
import gc
import sys
from collections import Counter
from pathlib import Path

from .inference import Inference, Scope, Value
from .names import ELSEWHERE, NAMED, NOT_INSTANTIATED, OWN_METHODS, STAND_INS, THEIRS, Named, StandIn
from .sources import Definition, Function, Signature, Sources, class_bindings, decorators, own_nodes

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "moe_coverage_plugin"
TOOLKITS = ("llmcompressor", "vllm")


class Check:
    """Compares one half of a package with the sources of a toolkit.

    Args:
        sources: sources of both packages.
        base_names: names of our classes that are bases of other classes of ours, and so may lack abstract methods.

    Attributes:
        moved: one line for each name that is missing or whose signature does not fit.
        unknown: one line for each use that cannot be checked, because a base class is built at run time or is missing.
        counts: number of checked names by kind.
    """

    def __init__(self, sources: Sources, base_names: frozenset[str]) -> None:
        self.sources = sources
        self.base_names = base_names
        self.inference = Inference(sources)
        self.moved: list[str] = []
        self.unknown: list[str] = []
        self.counts: Counter[str] = Counter()
        self._place = ""

    def module(self, module: str) -> None:
        """Check all names of other packages that one of our modules uses."""
        tree = self.sources.tree(module)
        self._place = module
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._imports(module, node)
        self._scope(tree, Scope(module))

    def _expect(self, kind: str, holds: bool, line: int, message: str) -> None:
        self.counts[kind] += 1
        if not holds:
            self.moved.append(f"{self._place}:{line}: {message}")

    def _imports(self, module: str, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            source = self.sources.absolute(module, node) if isinstance(node, ast.ImportFrom) else alias.name
            if source.partition(".")[0] not in THEIRS:
                continue
            path = f"{source}.{alias.name}" if isinstance(node, ast.ImportFrom) else source
            self._expect("imports", self.sources.find(path) is not None, node.lineno, f"{path} is missing")

    def _scope(self, node: ast.AST, scope: Scope) -> None:
        """Check the expressions of a module or function, then those of functions and classes in it."""
        for each in own_nodes(node):
            if isinstance(each, ast.Attribute):
                self._attribute(each, scope)
            elif isinstance(each, ast.Call):
                self._call(each, scope)
            elif isinstance(each, ast.ClassDef):
                cls = Definition(f"{scope.module}.{each.name}", scope.module, each)
                self._class(cls)
                self._scope(each, Scope(scope.module, cls))
            elif isinstance(each, Function):
                self._scope(each, self.inference.function(each, scope))

    def _attribute(self, node: ast.Attribute, scope: Scope) -> None:
        bases = [base for base in self.inference.values(node.value, scope) if self._is_theirs(base.definition)]
        if not bases:
            return
        if any((base.definition.path, node.attr) in ELSEWHERE for base in bases):
            return
        found = [base for base in bases if self.inference.find_attribute(base, node.attr) is not None]
        unknown = any(isinstance(b.definition.node, ast.ClassDef) and not self._complete(b) for b in bases)
        if not found and unknown:
            self.unknown.append(f"{self._place}:{node.lineno}: {ast.unparse(node)}")
            return
        names = " or ".join(base.definition.path for base in bases)
        self._expect("attributes", bool(found), node.lineno, f"{names} has no {node.attr}")

    def _is_theirs(self, definition: Definition) -> bool:
        """Whether a definition is theirs, or a class of ours that inherits from theirs."""
        if isinstance(definition.node, ast.ClassDef):
            return any(each.package in THEIRS for each in self.sources.mro(definition)[0])
        return definition.package in THEIRS

    def _complete(self, base: Value) -> bool:
        return self.sources.mro(base.definition)[1]

    def _call(self, node: ast.Call, scope: Scope) -> None:
        called = [each for each in self.inference.values(node.func, scope) if each.definition.package in THEIRS]
        called = [each for each in called if not each.instance]
        signatures = [self.inference.signature(each) for each in called]
        if None in signatures:
            self.unknown.append(f"{self._place}:{node.lineno}: {ast.unparse(node.func)}")
        if not called or None in signatures:
            return
        reasons = [mismatch(signature, node) for signature in signatures if signature is not None]
        names = " or ".join(each.definition.path for each in called)
        self._expect("calls", None in reasons, node.lineno, f"{names} {reasons[0]}")

    def _class(self, cls: Definition) -> None:
        """Compare the methods of one of our classes with those of its bases in other packages."""
        bases = [each for each in self.sources.mro(cls)[0][1:] if each.package in THEIRS]
        if not bases:
            return
        for name, (method, *_) in class_bindings(cls.node).items():
            if not isinstance(method, Function) or name.startswith("_"):
                continue
            base = self.sources.member(bases[0], name)
            if base is not None and isinstance(base.node, Function):
                self._override(method, base)
            elif base is None and "property" not in decorators(method) and f"{cls.path}.{name}" not in OWN_METHODS:
                message = f"{bases[0].path} has no {name} to override (list it in OWN_METHODS if it is our own)"
                self._expect("overrides", False, method.lineno, message)
        if cls.path.rpartition(".")[2] in self.base_names or cls.path in NOT_INSTANTIATED:
            return
        for name in {name for base in bases for name in class_bindings(base.node)}:
            found = self.sources.member(cls, name)
            if isinstance(found.node, Function) and "abstractmethod" in decorators(found.node):
                self._expect("overrides", False, cls.node.lineno, f"{found.path} is abstract and {cls.path} has none")

    def _override(self, method: Function, base: Definition) -> None:
        bound = [int("staticmethod" not in decorators(each)) for each in (method, base.node)]
        reason = incompatible(Signature.of(method, bound[0]), Signature.of(base.node, bound[1]))
        self._expect("overrides", reason is None, method.lineno, f"{base.path} {reason}")

    def named(self, entry: Named) -> None:
        """Check an entry of ``NAMED``."""
        self._place = "tests/drift/names.py"
        owner = self.sources.find(entry.owner)
        if owner is None:
            self._expect("names by hand", False, 0, f"{entry.owner} is missing ({entry.reason})")
            return
        for name in entry.names:
            if isinstance(owner.node, Function):
                holds = name in texts(owner.node)
            else:
                holds = self.sources.find(f"{entry.owner}.{name}") is not None
            self._expect("names by hand", holds, 0, f"{entry.owner} has no {name} ({entry.reason})")

    def stand_in(self, entry: StandIn) -> None:
        """Check that a function of ours can be called like theirs."""
        self._place = entry.ours
        ours, theirs = self.sources.find(entry.ours), self.sources.find(entry.theirs)
        assert ours is not None, f"names.py lists {entry.ours}, which we do not have"
        if theirs is None:
            self._expect("stand-ins", False, 0, f"{entry.theirs} is missing ({entry.reason})")
            return
        in_class = isinstance(self.sources.find(entry.theirs.rpartition(".")[0]).node, ast.ClassDef)
        bound = int(in_class and "staticmethod" not in decorators(theirs.node))
        reason = incompatible(Signature.of(ours.node, entry.given), Signature.of(theirs.node, bound))
        self._expect("stand-ins", reason is None, ours.node.lineno, f"{entry.theirs} {reason} ({entry.reason})")


def texts(node: ast.AST) -> set[str]:
    """Return the strings and attribute names in a function."""
    strings = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return strings | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def mismatch(signature: Signature, call: ast.Call) -> str | None:
    """Describe why a call does not fit a signature; ``None`` if it fits."""
    keywords = {each.arg for each in call.keywords if each.arg is not None}
    if not signature.any_keyword and (unknown := sorted(keywords - signature.keywords)):
        return f"takes no {', '.join(unknown)}"
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return None
    if len(call.args) > len(signature.positional) and not signature.any_positional:
        return f"takes {len(signature.positional)} arguments by position, we pass {len(call.args)}"
    if missing := sorted(signature.required - keywords - set(signature.positional[: len(call.args)])):
        return f"needs {', '.join(missing)}"
    return None


def incompatible(ours: Signature, theirs: Signature) -> str | None:
    """Describe why our function cannot be called like theirs; ``None`` if it can."""
    for index, name in enumerate(theirs.positional):
        own = ours.positional[index] if index < len(ours.positional) else None
        if own != name and not (own is None and ours.any_positional and (name in ours.keywords or ours.any_keyword)):
            return f"has {name} as its parameter {index + 1}, ours {own}"
    if not ours.any_keyword and (unknown := sorted(theirs.keywords - ours.keywords)):
        return f"takes {', '.join(unknown)}, ours does not"
    if theirs.any_keyword and not ours.any_keyword:
        return "takes any keyword, ours does not"
    if missing := sorted(ours.required - theirs.keywords - set(theirs.positional)):
        return f"has no {', '.join(missing)}, which ours needs"
    return None


def check_half(sources: Sources, toolkit: str, package: Path = PACKAGE) -> Check:
    """Check the half of our package for ``toolkit``: ``serving`` for vLLM, all other modules for llm-compressor."""
    half = [
        ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted(package.rglob("*.py"))
        if ("serving" in file.relative_to(package).parts) == (toolkit == "vllm")
    ]
    classes = [node for module in half for node in ast.walk(sources.tree(module)) if isinstance(node, ast.ClassDef)]
    check = Check(sources, frozenset(ast.unparse(base) for node in classes for base in node.bases))
    # syntax trees are millions of objects that remain in use, so garbage collection would take half of the time
    gc.disable()
    try:
        for module in half:
            check.module(module)
        for entry in NAMED[toolkit]:
            check.named(entry)
        for entry in STAND_INS[toolkit]:
            check.stand_in(entry)
    finally:
        gc.freeze()
        gc.enable()
    return check


def open_sources(given: dict[str, Path]) -> Sources:
    """Open the sources of this package, of the given packages, and of installed packages."""
    return Sources({PACKAGE.name: PACKAGE, **given})


def given_sources(text: str) -> tuple[str, Path]:
    """Parse ``vllm=/unpacked``, where the directory is that of the package or its parent."""
    package, _, directory = text.partition("=")
    path = Path(directory) / package if (Path(directory) / package).is_dir() else Path(directory)
    if package not in THEIRS or not (path / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not PACKAGE=DIRECTORY with one of {', '.join(THEIRS)} in it")
    return package, path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=given_sources, action="append", default=[], metavar="PACKAGE=DIRECTORY")
    sources = open_sources(dict(parser.parse_args().sources))
    toolkits = [toolkit for toolkit in TOOLKITS if sources.root(toolkit) is not None]
    if not toolkits:
        parser.error(f"none of {', '.join(TOOLKITS)} is installed or given")
    moved = 0
    for toolkit in toolkits:
        check = check_half(sources, toolkit)
        present = [name for name in THEIRS if name not in TOOLKITS and sources.root(name) is not None]
        versions = ", ".join(f"{name} {sources.version(name)}" for name in (toolkit, *present))
        print(f"{versions}: {', '.join(f'{count} {kind}' for kind, count in sorted(check.counts.items()))}")
        for line in check.moved:
            print(f"  {line}")
        for line in check.unknown:
            print(f"  not decided: {line}")
        moved += len(check.moved)
    print(f"{moved} moved" if moved else "nothing moved")
    return int(moved > 0)


if __name__ == "__main__":
    sys.exit(main())
