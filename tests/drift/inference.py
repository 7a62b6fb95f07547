"""Infers the types of values in functions, to find the classes whose attributes are read and called."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from .sources import DEFINITIONS, Definition, Function, Signature, Sources, decorators, own_nodes


@dataclass(frozen=True)
class Value:
    """A definition, or an instance of a class.

    Attributes:
        definition: the definition.
        instance: whether the value is an instance of the class.
        bound: whether the first parameter of a function is given, as by ``object.method``.
        inherited: whether attributes are looked up only in the bases of a class, as by ``super()``.
    """

    definition: Definition
    instance: bool = False
    bound: bool = False
    inherited: bool = False


@dataclass
class Scope:
    """The names in a function with their possible values; other names are those of the module.

    Attributes:
        module: the module of the function.
        owner: the class of which the function is a method.
        names: possible values by name.
        narrowed: name, first line, last line and value of each ``isinstance`` check.
    """

    module: str
    owner: Definition | None = None
    names: dict[str, list[Value]] = field(default_factory=dict)
    narrowed: list[tuple[str, float, float, Value]] = field(default_factory=list)


class Inference:
    """Infers types from annotations, constructors and ``isinstance``; other types stay unknown."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._pending: set[int] = set()

    def function(self, node: Function, outer: Scope) -> Scope:
        """Return the scope of a function or method."""
        scope = Scope(outer.module, outer.owner, dict(outer.names), list(outer.narrowed))
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for parameter in parameters:
            scope.names[parameter.arg] = self.annotated(parameter.annotation, scope.module)
        if scope.owner is not None and not outer.names and parameters and "staticmethod" not in decorators(node):
            scope.names[parameters[0].arg] = [Value(scope.owner, instance="classmethod" not in decorators(node))]
        for each in own_nodes(node):
            if isinstance(each, (ast.Assign, ast.NamedExpr)):
                target = each.targets[0] if isinstance(each, ast.Assign) else each.target
                if isinstance(target, ast.Name):
                    scope.names[target.id] = self.values(each.value, scope)
            elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                scope.names[each.target.id] = self.annotated(each.annotation, scope.module)
        for each in own_nodes(node):
            if isinstance(each, (ast.Assert, ast.If, ast.comprehension)):
                self._narrow(each, scope)
        return scope

    def _narrow(self, node: ast.Assert | ast.If | ast.comprehension, scope: Scope) -> None:
        tests = node.ifs if isinstance(node, ast.comprehension) else [node.test]
        for each in (part for test in tests for part in ast.walk(test)):
            match each:
                case ast.Call(func=ast.Name("isinstance"), args=[ast.Name(name), classes]):
                    first, last = each.lineno, float("inf")
                    if isinstance(node, ast.If):
                        # "if not isinstance(...)" leaves the function or loop, so the value is an instance afterwards
                        leaves = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
                        first, last = (node.body[-1].end_lineno, last) if leaves else (first, node.body[-1].end_lineno)
                    for value in self.values(classes, scope):
                        scope.narrowed.append((name, first, last, Value(value.definition, instance=True)))

    def annotated(self, annotation: ast.expr | None, module: str) -> list[Value]:
        """Return instances of the classes in an annotation."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return self.annotated(ast.parse(annotation.value, mode="eval").body, module)
        if isinstance(annotation, ast.BinOp):
            return [*self.annotated(annotation.left, module), *self.annotated(annotation.right, module)]
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).endswith("Optional"):
            return self.annotated(annotation.slice, module)
        if not isinstance(annotation, (ast.Name, ast.Attribute)):
            return []
        found = self.sources.named(module, ast.unparse(annotation))
        return [Value(found, instance=True)] if found is not None and isinstance(found.node, ast.ClassDef) else []

    def values(self, node: ast.expr, scope: Scope) -> list[Value]:
        """Return the possible values of an expression; empty if they are unknown."""
        # the value depends on itself
        if id(node) in self._pending:
            return []
        self._pending.add(id(node))
        try:
            return self._values(node, scope)
        finally:
            self._pending.remove(id(node))

    def _values(self, node: ast.expr, scope: Scope) -> list[Value]:
        match node:
            case ast.Name():
                narrowed = [v for name, a, b, v in scope.narrowed if name == node.id and a <= node.lineno <= b]
                if node.id in scope.names or narrowed:
                    return [*scope.names.get(node.id, []), *narrowed]
                return self._read(self.sources.lookup(scope.module, node.id))
            case ast.Attribute():
                return [each for base in self.values(node.value, scope) for each in self.attribute(base, node.attr)]
            case ast.Call(func=ast.Name("super")) if scope.owner is not None:
                return [Value(scope.owner, instance=True, inherited=True)]
            case ast.Call():
                return [each for called in self.values(node.func, scope) for each in self._returned(called)]
            case ast.BoolOp():
                return [each for value in node.values for each in self.values(value, scope)]
            case ast.IfExp():
                return [*self.values(node.body, scope), *self.values(node.orelse, scope)]
            case ast.NamedExpr():
                return self.values(node.value, scope)
        return []

    def find_attribute(self, base: Value, name: str) -> Definition | None:
        """Find the definition of an attribute of a value."""
        definition = base.definition
        if isinstance(definition.node, ast.Module):
            return self.sources.lookup(definition.path, name)
        if not isinstance(definition.node, ast.ClassDef):
            return None
        if not base.inherited:
            return self.sources.member(definition, name)
        above = self.sources.mro(definition)[0][1:]
        return next((found for cls in above if (found := self.sources.member(cls, name)) is not None), None)

    def attribute(self, base: Value, name: str) -> list[Value]:
        """Return the possible values of an attribute."""
        found = self.find_attribute(base, name)
        if found is None or not isinstance(found.node, Function):
            return self._read(found, base.definition if isinstance(base.definition.node, ast.ClassDef) else None)
        kinds = decorators(found.node)
        if base.instance and kinds & {"property", "cached_property"}:
            return self.annotated(found.node.returns, found.module)
        in_class = isinstance(base.definition.node, ast.ClassDef) and "staticmethod" not in kinds
        return [Value(found, bound=in_class and (base.instance or base.inherited or "classmethod" in kinds))]

    def _read(self, found: Definition | None, owner: Definition | None = None) -> list[Value]:
        if found is None:
            return []
        if isinstance(found.node, ast.AnnAssign):
            return self.annotated(found.node.annotation, found.module)
        if isinstance(found.node, ast.Assign):
            return self.values(found.node.value, self._scope_of(found, owner))
        return [Value(found)] if isinstance(found.node, (ast.Module, *DEFINITIONS)) else []

    def _scope_of(self, found: Definition, owner: Definition | None) -> Scope:
        """Return the scope of an assignment to ``self``: the parameters of the method that contains it."""
        scope = Scope(found.module, owner)
        if owner is None:
            return scope
        cls = next(each for each in self.sources.mro(owner)[0] if found.path.rpartition(".")[0] == each.path)
        for method in (each for each in own_nodes(cls.node) if isinstance(each, Function)):
            if method.lineno <= found.node.lineno <= method.end_lineno:
                for parameter in (*method.args.args, *method.args.kwonlyargs):
                    scope.names[parameter.arg] = self.annotated(parameter.annotation, cls.module)
        return scope

    def _returned(self, called: Value) -> list[Value]:
        node = called.definition.node
        if isinstance(node, ast.ClassDef) and not called.instance:
            return [Value(called.definition, instance=True)]
        if isinstance(node, Function):
            return self.annotated(node.returns, called.definition.module)
        return []

    def signature(self, called: Value) -> Signature | None:
        """Return the parameters of a function or class; ``None`` if they are unknown."""
        node = called.definition.node
        if isinstance(node, Function):
            return Signature.of(node, bound=int(called.bound))
        return self.sources.constructor(called.definition) if not called.instance else None
