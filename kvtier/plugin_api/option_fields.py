"""Defines options as fields of a dataclass: type, bounds, default and meaning are written once.

``read`` reads them from a configuration, and the tables of the configuration's reference
are made from them::

    @dataclass(frozen=True)
    class ShelfOptions:
        capacity_blocks: Annotated[Integer, Meta(ge=1)]
        "how many blocks there is room for"
        linger_s: Seconds = 0.5
        "how long a removed block is kept"

    reader = Options(options, f"secondary tier {context.tier_name}")
    given = ShelfOptions(**read(ShelfOptions, reader))
    reader.finish()

A field is an option if its type is one of those below, or a ``Literal``. ``Meta`` is
``msgspec``'s; its ``ge`` and ``le`` are bounds. A default of None means that the option may be
omitted: then the field is None. The types of all fields are evaluated, so their names must be
imported at run time, not only for a type checker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import Meta

from kvtier.plugin_api.options import REQUIRED, Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import DataclassInstance

_Any = TypeVar("_Any")

Integer: TypeAlias = Annotated[int, Options.integer]
"""A whole number, 0 or more."""

Size: TypeAlias = Annotated[int, Options.size]
"""A number of bytes."""

Number: TypeAlias = Annotated[float, Options.number]
"""A float above 0."""

Seconds: TypeAlias = Annotated[float, Options.seconds]
"""A duration above 0."""

WholeSeconds: TypeAlias = Annotated[int, Options.whole_seconds]
"""A duration in whole seconds, 0 or more."""

Text: TypeAlias = Annotated[str, Options.text]
"""A text that is not empty. One of a few: ``Literal``."""

Path: TypeAlias = Annotated[str, Options.path]
"""A path, made absolute. Without a default."""

Flag: TypeAlias = Annotated[bool, Options.flag]
"""True or false."""

Table: TypeAlias = Annotated[Mapping[str, Any], Options.mapping, Meta(extra={"required": True})]
"""A mapping. Without a default."""

ReadApart: TypeAlias = Annotated[_Any, None]
"""An option that the class reads itself: ``read`` only accepts its key."""


@dataclass(frozen=True)
class OptionField:
    """The option that a field describes."""

    default: Any
    method: Callable[..., Any] | None  #: of ``Options``; None: its class reads it itself
    bounds: Mapping[str, Any]  #: arguments of ``method``

    def value(self, options: Options, key: str) -> Any:  # noqa: ANN401 - the field's type
        """Return the given value, else the default. Raises ``ConfigError``."""
        if self.method is None or not (options.has(key) or self.default is REQUIRED):
            return self.default
        return self.method(options, key, **self.bounds)


@cache
def options_of(kind: type[DataclassInstance]) -> dict[str, OptionField]:
    """Return the options among the fields of a dataclass, by name: keyword-only ones last."""
    types = get_type_hints(kind, include_extras=True)
    return {
        each.name: _option(part, REQUIRED if each.default is MISSING else each.default)
        for each in sorted(fields(kind), key=lambda field: field.kw_only is True)
        for part in (types[each.name], *get_args(types[each.name]))
        if get_origin(part) in (Annotated, Literal)
    }


def read(
    kind: type[DataclassInstance], options: Options, *, given_only: bool = False
) -> dict[str, Any]:
    """Return a ``kind``'s arguments: the given values and, unless ``given_only``, the defaults.

    Raises ``ConfigError`` for the first bad value.
    """
    known = options_of(kind)
    options.allow(*known)
    return {
        key: option.value(options, key)
        for key, option in known.items()
        if option.method is not None and (options.has(key) or not given_only)
    }


def _option(kind: Any, default: object) -> OptionField:  # noqa: ANN401 - a type, as annotated
    if get_origin(kind) is Literal:
        return OptionField(default, Options.text, {"choices": get_args(kind)})
    method, *metas = kind.__metadata__
    bounds: dict[str, Any] = {}
    for meta in metas:
        if meta != Meta(ge=meta.ge, le=meta.le, extra=meta.extra):
            raise TypeError(
                f"{meta} has more than ge and le, which are all that options are held to"
            )
        given = {"minimum": meta.ge, "maximum": meta.le, **(meta.extra or {})}
        bounds |= {name: bound for name, bound in given.items() if bound is not None}
    return OptionField(default, method, bounds)
