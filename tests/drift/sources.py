"""Finds definitions in the source files of packages, which are not imported and need not be installed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, eq=False)
class Definition:
    """A module, class, function or assignment.

    Attributes:
        path: dotted path, ``package.module.Class.method``.
        module: the module that contains it, whose names it uses.
        node: its syntax tree.
    """

    path: str
    module: str
    node: ast.AST

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


@dataclass(frozen=True)
class Signature:
    """Parameters of a function, without ``self``."""

    positional: tuple[str, ...]
    keywords: frozenset[str]
    required: frozenset[str]
    any_positional: bool = False
    any_keyword: bool = False

    @classmethod
    def of(cls, function: Function, bound: int = 0) -> Signature:
        """Return the signature of a function whose first ``bound`` parameters are given."""
        given = function.args
        positional = [*given.posonlyargs, *given.args]
        optional = {each.arg for each in positional[len(positional) - len(given.defaults) :]}
        optional |= {each.arg for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default}
        named = [*given.args[max(bound - len(given.posonlyargs), 0) :], *given.kwonlyargs]
        every = {each.arg for each in (*positional[bound:], *given.kwonlyargs)}
        return cls(
            positional=tuple(each.arg for each in positional[bound:]),
            keywords=frozenset(each.arg for each in named),
            required=frozenset(every - optional),
            any_positional=given.vararg is not None,
            any_keyword=given.kwarg is not None,
        )


def decorators(node: Function | ast.ClassDef) -> set[str]:
    """Return the last parts of the names of decorators, for example ``setter`` for ``@x.setter``."""
    called = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called}


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module, class or function, without the bodies of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, DEFINITIONS):
            yield from own_nodes(child)


def bound_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a definition, import or assignment binds."""
    if isinstance(node, DEFINITIONS):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else alias.name.partition(".")[0])
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        yield from (each.id for target in targets(node) for each in ast.walk(target) if isinstance(each, ast.Name))


def targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


class Sources:
    """Source files of packages: the given ones, and all others that this interpreter can import.

    Args:
        roots: directories of packages to use instead of the installed ones.
    """

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self._roots = dict(roots)
        # an instance exists for one check, so its caches need no limit
        self.file, self.text, self.tree = cache(self.file), cache(self.text), cache(self.tree)
        self.bindings = cache(self.bindings)
        self.lookup, self.mro, self.member = cache(self.lookup), cache(self.mro), cache(self.member)

    def root(self, package: str) -> Path | None:
        """Return the directory of a package, or the file of a module that is not a package."""
        if package not in self._roots and (spec := find_spec(package)) is not None:
            # frozen modules of the standard library have no origin
            origin = spec.origin if spec.has_location else getattr(spec.loader_state, "filename", None)
            if origin is not None:
                self._roots[package] = Path(origin).parent if Path(origin).name == "__init__.py" else Path(origin)
        return self._roots.get(package)

    def version(self, package: str) -> str:
        """Return the version from the name of the metadata directory or from ``_version.py``."""
        root = self.root(package)
        assert root is not None, f"{package} was found"
        for path in root.parent.glob("*.dist-info"):
            if match := re.fullmatch(rf"{package}(?:_cpu)?-(.+)\.dist-info", path.name):
                return match[1]
        file = root / "_version.py"
        match = re.search(r"version = '([^']+)'", file.read_text()) if file.is_file() else None
        return match[1] if match else "unknown"

    def file(self, module: str) -> Path | None:
        """Return the file of a module."""
        package, *rest = module.split(".")
        if (root := self.root(package)) is None or root.suffix == ".py":
            return root if not rest else None
        path = root.joinpath(*rest)
        return next(
            (file for file in (path / "__init__.py", path.with_name(path.name + ".py")) if file.is_file()), None
        )

    def text(self, module: str) -> str:
        """The text of a module's file."""
        file = self.file(module)
        assert file is not None, f"{module} was found"
        return file.read_text()

    def tree(self, module: str) -> ast.Module:
        """The parsed file of a module."""
        return ast.parse(self.text(module), str(self.file(module)))

    def bindings(self, module: str) -> dict[str, list[ast.AST]]:
        """Statements that bind each name of a module, definitions and imports before assignments, last ones first."""
        names: dict[str, list[ast.AST]] = {}
        for node in own_nodes(self.tree(module)):
            for name in bound_names(node):
                names.setdefault(name, []).insert(0, node)
        for nodes in names.values():
            nodes.sort(key=lambda node: isinstance(node, (ast.Assign, ast.AnnAssign)) or is_overload(node))
        return names

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import names, which may be relative to ``module``."""
        if not node.level:
            return node.module or ""
        file = self.file(module)
        above = module.split(".")[: -node.level + (file is not None and file.name == "__init__.py") or None]
        return ".".join([*above, *([node.module] if node.module else [])])

    def find(self, path: str) -> Definition | None:
        """Find the definition of a dotted path, which may include members of classes."""
        parts = path.split(".")
        count = next((n for n in range(len(parts), 0, -1) if self.file(".".join(parts[:n]))), 0)
        if not count:
            return None
        module = ".".join(parts[:count])
        found: Definition | None = Definition(module, module, self.tree(module))
        for part in parts[count:]:
            if found is None:
                return None
            found = self.lookup(found.path, part) if isinstance(found.node, ast.Module) else self.inner(found, part)
        return found

    def inner(self, outer: Definition, name: str) -> Definition | None:
        """Find a member of a class, or a function inside a function."""
        if isinstance(outer.node, ast.ClassDef):
            return self.member(outer, name)
        inside = (each for each in ast.walk(outer.node) if isinstance(each, Function) and each.name == name)
        return next((Definition(f"{outer.path}.{name}", outer.module, each) for each in inside), None)

    def lookup(self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> Definition | None:
        """Find the definition of a name in a module, through re-exports."""
        if (module, name) in seen or self.file(module) is None:
            return None
        seen |= {(module, name)}
        # files that contain neither the name nor a star import need not be parsed
        named = any(word in self.text(module) for word in (name, "import *"))
        bindings = self.bindings(module) if named else {}
        for node in bindings.get(name, ()):
            if (found := self._follow(module, name, node, seen)) is not None:
                return found
        if self.file(f"{module}.{name}") is not None:
            return Definition(f"{module}.{name}", f"{module}.{name}", self.tree(f"{module}.{name}"))
        for node in bindings.get("*", ()):
            assert isinstance(node, ast.ImportFrom)
            if (found := self.lookup(self.absolute(module, node), name, seen)) is not None:
                return found
        return None

    def _follow(self, module: str, name: str, node: ast.AST, seen: frozenset[tuple[str, str]]) -> Definition | None:
        if isinstance(node, ast.ImportFrom):
            original = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
            source = self.absolute(module, node)
            # the imported name can be a submodule of the package, which is not bound in its file
            return self.lookup(source, original, seen) or self._submodule(source, original)
        if isinstance(node, ast.Import):
            alias = next(each for each in node.names if name in (each.asname, each.name.partition(".")[0]))
            return self.find(alias.name if alias.asname else name)
        alias_of = node.value.id if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) else None
        found = self.lookup(module, alias_of, seen) if alias_of is not None else None
        return found or Definition(f"{module}.{name}", module, node)

    def _submodule(self, module: str, name: str) -> Definition | None:
        path = f"{module}.{name}"
        return Definition(path, path, self.tree(path)) if self.file(path) is not None else None

    def mro(self, cls: Definition) -> tuple[tuple[Definition, ...], bool]:
        """Return a class and all its bases, depth first, and whether all bases were found."""
        assert isinstance(cls.node, ast.ClassDef)
        classes, complete = {cls.path: cls}, True
        for base in cls.node.bases:
            name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
            found = self.named(cls.module, name)
            if found is not None and isinstance(found.node, ast.ClassDef):
                above, all_found = self.mro(found)
                classes |= {each.path: each for each in above if each.path not in classes}
                complete &= all_found
            else:
                complete &= name == "object"
        return tuple(classes.values()), complete

    def named(self, module: str, dotted: str) -> Definition | None:
        """Find the definition of a dotted name in a module."""
        first, *rest = dotted.split(".")
        found = self.lookup(module, first)
        for part in rest:
            if found is None:
                return None
            found = self.lookup(found.path, part) if isinstance(found.node, ast.Module) else self.inner(found, part)
        return found

    def member(self, cls: Definition, name: str) -> Definition | None:
        """Find a method, field or attribute of a class or its bases."""
        for each in self.mro(cls)[0]:
            if nodes := class_bindings(each.node).get(name):
                return Definition(f"{each.path}.{name}", each.module, nodes[0])
        return None

    def constructor(self, cls: Definition) -> Signature | None:
        """Return the parameters of a class; ``None`` if some of its bases were not found."""
        classes, complete = self.mro(cls)
        for each in classes:
            own = [node for node in class_bindings(each.node).get("__init__", ()) if isinstance(node, Function)]
            if each.path == "pydantic.main.BaseModel" or (not own and "dataclass" in decorators(each.node)):
                return _fields(classes)
            if own:
                return Signature.of(own[0], bound=1)
        return Signature((), frozenset(), frozenset()) if complete else None


def is_overload(node: ast.AST) -> bool:
    return isinstance(node, Function) and "overload" in decorators(node)


@cache
def class_bindings(node: ast.ClassDef) -> dict[str, list[ast.AST]]:
    """Return the statements that bind each member of a class, in its body or by ``self`` in its methods."""
    names: dict[str, list[ast.AST]] = {}
    for each in own_nodes(node):
        for name in bound_names(each):
            names.setdefault(name, []).append(each)
    for assignment in (each for each in ast.walk(node) if isinstance(each, (ast.Assign, ast.AnnAssign))):
        for part in (part for target in targets(assignment) for part in ast.walk(target)):
            if isinstance(part, ast.Attribute) and ast.unparse(part.value) in ("self", "cls"):
                names.setdefault(part.attr, []).append(assignment)
    for nodes in names.values():
        nodes.sort(key=lambda node: isinstance(node, ast.Assign) or is_overload(node))
    return names


def _fields(classes: Iterable[Definition]) -> Signature:
    """Return the signature of a dataclass or pydantic model, from its annotated fields."""
    fields = {
        node.target.id: node.value is None
        for each in reversed([*classes])
        for node in each.node.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_"
    }
    required = frozenset(name for name, is_required in fields.items() if is_required)
    return Signature(tuple(fields), frozenset(fields), required)
