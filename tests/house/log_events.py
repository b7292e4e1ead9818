"""Finds the events of kvtier's log lines in the source: those of level warning and error.

An event may be a text with holes, a choice of two, a name that a function was given, or a notice
that an actor posts to its cell's log. What stands in a hole is not known here: it becomes ``…``.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from sources import name_of, tree_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

LEVELS: Final = ("warning", "error")
HOLE: Final = "…"
NOTICE: Final = ("event", "tier", "detail", "level")  #: fields of ``kvtier.core.messages.Notice``

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_Bound: TypeAlias = dict[str, tuple[ast.expr, _Function | None]]


class _Line(NamedTuple):
    """A call that writes a log line, and the function that it stands in."""

    event: ast.expr
    level: ast.expr
    function: _Function | None


class _File:
    """One file's log lines."""

    def __init__(self, tree: ast.Module, name: str) -> None:
        self._tree = tree
        self._name = name
        self._function_of: dict[ast.AST, _Function] = {}
        for node in ast.walk(self._tree):  # outer functions come first, so the inner ones hold
            if isinstance(node, _Function):
                self._function_of |= dict.fromkeys(ast.walk(node), node)

    def events(self) -> Iterator[str]:
        """Yield each event of a line that is a warning or an error."""
        for line in self._lines():
            for bound in self._bindings(line):
                if self._texts(line.level, line.function, bound) & set(LEVELS):
                    yield from self._texts(line.event, line.function, bound)

    def _lines(self) -> Iterator[_Line]:
        for node in ast.walk(self._tree):
            if not (isinstance(node, ast.Call) and node.args + node.keywords):
                continue
            called, function = ast.unparse(node.func), self._function_of.get(node)
            head, _, last = called.rpartition(".")
            if head == "log" and last in LEVELS:
                yield _Line(node.args[0], ast.Constant(last), function)
            elif last == "Notice":
                given = dict(zip(NOTICE, node.args, strict=False))
                given |= {each.arg: each.value for each in node.keywords if each.arg}
                level = given.get("level", ast.Constant("warning"))
                yield _Line(given["event"], level, function)

    def _bindings(self, line: _Line) -> Iterator[_Bound]:
        """Yield what the function's parameters are, for each call of it in the file."""
        function = line.function
        names = [each.arg for each in function.args.args] if function else []
        passed = {each.id for each in (line.event, line.level) if isinstance(each, ast.Name)}
        if function is None or not passed & set(names):
            yield {}
            return
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call) and _last_name(node.func) == function.name:
                if self._class_of(node) != self._class_of(function):
                    continue  # another class has a method of this name
                positional = names[1:] if isinstance(node.func, ast.Attribute) else names
                given = dict(zip(positional, node.args, strict=False))
                given |= {each.arg: each.value for each in node.keywords if each.arg}
                caller = self._function_of.get(node)
                yield {name: (value, caller) for name, value in given.items()}

    def _class_of(self, node: ast.AST) -> str:
        inner = ""
        for each in ast.walk(self._tree):
            if isinstance(each, ast.ClassDef) and node in ast.walk(each):
                inner = each.name
        return inner

    def _texts(self, node: ast.expr, function: _Function | None, bound: _Bound) -> set[str]:
        """Return what an expression may be. Fails where that can't be seen."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return {node.value}
        if isinstance(node, ast.JoinedStr):
            return {"".join(self._part(each) for each in node.values)}
        if isinstance(node, ast.IfExp):
            return self._texts(node.body, function, bound) | self._texts(
                node.orelse, function, bound
            )
        if isinstance(node, ast.Name):
            if node.id in bound:
                value, caller = bound[node.id]
                return self._texts(value, caller, {})
            assigned = self._assigned(node.id, function or self._tree)
            if assigned:
                return set().union(*(self._texts(each, function, bound) for each in assigned))
        where = f"{self._name}:{node.lineno}"
        raise AssertionError(f"{where}: nobody can tell which event this is: {ast.unparse(node)}")

    def _part(self, part: ast.expr) -> str:
        """Return a part of a text with holes; a hole that has a constant's name is filled."""
        if isinstance(part, ast.Constant):
            return str(part.value)
        assert isinstance(part, ast.FormattedValue)
        for value in self._assigned(ast.unparse(part.value), self._tree):
            if isinstance(value, ast.Constant | ast.JoinedStr):
                (text,) = self._texts(value, None, {})
                return text
        return HOLE

    def _assigned(self, name: str, scope: ast.AST) -> list[ast.expr]:
        """Return what a name is set to in a function, or a file."""
        found: list[ast.expr] = []
        for node in ast.walk(scope):
            targets: Sequence[ast.expr] = ()
            if isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                targets = [node.target]
            for target in targets:
                assert isinstance(node, ast.Assign | ast.AnnAssign)
                assert node.value is not None
                found += [value for left, value in _pairs(target, node.value) if left == name]
        return found


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for left, right in zip(target.elts, value.elts, strict=True):
            yield ast.unparse(left), right
    else:
        yield ast.unparse(target), value


def _last_name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def events_in(path: Path) -> set[str]:
    """Return the events of a file's warnings and errors, with ``…`` for each hole."""
    return events_of(tree_of(path), name_of(path))


def events_of(tree: ast.Module, name: str) -> set[str]:
    """Return the events of a parsed file. ``name``: where an event that can't be seen is."""
    return set(_File(tree, name).events())
