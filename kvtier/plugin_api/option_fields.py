"""Defines options as fields of a dataclass: default, bounds and meaning are written once.

``read`` reads them from a configuration, and the tables of the configuration's reference
are made from them::

    @dataclass(frozen=True)
    class ShelfOptions:
        capacity_blocks: int = field(
            metadata=required(Options.integer, "how many blocks there is room for", minimum=1)
        )
        linger_s: float = seconds(0.5, "how long a removed block is kept")

    reader = Options(options, f"secondary tier {context.tier_name}")
    given = ShelfOptions(**read(ShelfOptions, reader))
    reader.finish()

A default of None means that the option may be omitted: then the field is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvtier.plugin_api.options import INTEGER_MAX, REQUIRED, SECONDS_MAX, Options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from _typeshed import DataclassInstance

_Any = TypeVar("_Any")
_Int = TypeVar("_Int", bound="int | None")
_Float = TypeVar("_Float", bound="float | None")
_Flag = TypeVar("_Flag", bound="bool | None")
_Text = TypeVar("_Text", bound="str | None")

_OPTION: Final = "kvtier option"


@dataclass(frozen=True)
class OptionField:
    """The option that a field describes."""

    about: str  #: for the reference: one line of Markdown
    default: Any
    method: Callable[..., Any] | None = None  #: of ``Options``; None: its class reads it itself
    bounds: Mapping[str, Any] = field(default_factory=dict)  #: arguments of ``method``

    def value(self, options: Options, key: str) -> Any:  # noqa: ANN401 - the field's type
        """Return the given value, else the default. Raises ``ConfigError``."""
        if self.method is None or not (options.has(key) or self.default is REQUIRED):
            return self.default
        return self.method(options, key, **self.bounds)


def integer(default: _Int, about: str, *, minimum: int = 0, maximum: int = INTEGER_MAX) -> _Int:
    """Make a field for a whole number."""
    return _field(about, default, Options.integer, minimum=minimum, maximum=maximum)


def size(default: _Int, about: str, *, minimum: int = 0) -> _Int:
    """Make a field for a number of bytes."""
    return _field(about, default, Options.size, minimum=minimum)


def number(
    default: _Float, about: str, *, minimum: float | None = None, maximum: float = SECONDS_MAX
) -> _Float:
    """Make a field for a float: above 0, or ``minimum`` or more."""
    return _field(about, default, Options.number, minimum=minimum, maximum=maximum)


def seconds(
    default: _Float, about: str, *, minimum: float | None = None, maximum: float = SECONDS_MAX
) -> _Float:
    """Make a field for a duration: above 0, or ``minimum`` or more."""
    return _field(about, default, Options.seconds, minimum=minimum, maximum=maximum)


def whole_seconds(
    default: _Int, about: str, *, minimum: int = 0, maximum: int = INTEGER_MAX
) -> _Int:
    """Make a field for a duration in whole seconds."""
    return _field(about, default, Options.whole_seconds, minimum=minimum, maximum=maximum)


def text(default: _Text, about: str, *, choices: Sequence[str] = ()) -> _Text:
    """Make a field for a text, one of ``choices`` if there are any."""
    return _field(about, default, Options.text, choices=choices)


def flag(about: str, *, default: _Flag) -> _Flag:
    """Make a field for true or false. ``default`` may be None: it then depends on other options."""
    return _field(about, default, Options.flag)


def read_apart(default: _Any, about: str) -> _Any:
    """Make a field whose option the class reads itself: ``read`` only accepts its key."""
    return _field(about, default, None)


def required(method: Callable[..., Any], about: str, **bounds: object) -> dict[str, OptionField]:
    """Return the ``metadata`` of a field whose option must be given. ``method``: of ``Options``."""
    return {_OPTION: OptionField(about, REQUIRED, method, bounds)}


def options_of(kind: type[DataclassInstance]) -> dict[str, OptionField]:
    """Return the options among the fields of a dataclass, by name."""
    return {f.name: f.metadata[_OPTION] for f in fields(kind) if _OPTION in f.metadata}


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


def _field(about: str, default: _Any, method: Callable[..., Any] | None, **bounds: object) -> _Any:
    return field(default=default, metadata={_OPTION: OptionField(about, default, method, bounds)})
