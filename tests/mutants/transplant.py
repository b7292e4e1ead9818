"""Gives functions that are there already the code that they have in a changed source.

So a mutant costs no import: the tests are collected once, with the module as it is, and a fork
then changes the function. What runs as the module is imported can't be changed so late:
constants, defaults of arguments, decorators, bodies of classes.
"""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType


class RunAtImportError(Exception):
    """Raised for a change of what an import runs."""


class Transplant:
    """The functions of a module that a changed source gives other code."""

    def __init__(self, module: ModuleType, original: str, changed: str) -> None:
        """Raise ``RunAtImportError`` unless all that changes is in functions."""
        path = module.__file__ or ""
        pairs = _pairs(_compiled(original, path), _compiled(changed, path), ())
        self._codes = [
            (_function_at(module, names, old), new) for names, old, new in pairs if old != new
        ]
        if not self._codes:
            raise RunAtImportError("nothing changes")
        for function, new in self._codes:
            if function.__code__.co_freevars != new.co_freevars:
                raise RunAtImportError("a closure changes")
        codes = [function.__code__ for function, _ in self._codes]
        #: those that change: their qualified names and first lines
        self.functions = [(each.co_qualname, each.co_firstlineno) for each in codes]

    def apply(self) -> None:
        """Give the functions their new code, for good."""
        for function, new in self._codes:
            function.__code__ = new


def _compiled(source: str, path: str) -> CodeType:
    return compile(source, path, "exec", dont_inherit=True)


def _pairs(
    old: CodeType, new: CodeType, names: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], CodeType, CodeType]]:
    """Yield the names, the old and the new code of each function, given a module's or a class's."""
    olds, news = _inner(old), _inner(new)
    if _own(old) != _own(new) or [each.co_name for each in olds] != [each.co_name for each in news]:
        raise RunAtImportError(old.co_name)
    for before, after in zip(olds, news, strict=True):
        path = (*names, before.co_name)
        if not before.co_flags & inspect.CO_OPTIMIZED:
            yield from _pairs(before, after, path)
        elif before.co_name.startswith("<"):  # a lambda or a comprehension that is run already
            if _shape(before) != _shape(after):
                raise RunAtImportError(before.co_name)
        else:
            yield path, before, after


def _inner(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _own(code: CodeType) -> tuple[object, ...]:
    """Return what a code does by itself; not on which lines."""
    consts = [repr(each) for each in code.co_consts if not isinstance(each, CodeType)]
    return code.co_code, code.co_names, code.co_varnames, consts, code.co_exceptiontable


def _shape(code: CodeType) -> tuple[object, ...]:
    return _own(code), *map(_shape, _inner(code))


def _function_at(module: ModuleType, names: tuple[str, ...], code: CodeType) -> FunctionType:
    """Return the function that has this code, through the decorators that say what they wrap."""
    place: Any = module
    for name in names[:-1]:
        place = vars(place)[name]
    wanted = code.co_qualname, code.co_firstlineno
    for found in _unwrapped(vars(place).get(names[-1])):
        if isinstance(found, FunctionType):
            there = found.__code__
            if (there.co_qualname, there.co_firstlineno) == wanted:
                return found
    raise RunAtImportError(".".join(names))


def _unwrapped(found: Any) -> Iterator[Any]:
    """Yield what is there, and what it wraps."""
    waiting = [found]
    while waiting:
        each = waiting.pop()
        if each is not None:
            yield each
            names = ("__func__", "__wrapped__", "fget", "fset", "fdel", "func")
            waiting += [getattr(each, name, None) for name in names]
