"""Reads one mapping of configuration keys, and refuses unknown ones.

Used for ``kv_connector_extra_config`` and for each entry of
``secondary_tiers``. Every refusal is a ``ConfigError`` that names the key, the
value and the remedy.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.sizes import parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

REQUIRED: Any = object()
"""The default of an option without one: it must be given."""

INTEGER_MAX: Final = (1 << 63) - 1
"""The most that every file format and system call can hold."""

SECONDS_MAX: Final = 1e6
"""Eleven days. Some system calls take a time in milliseconds, and no more than 2 to the 31st."""

TEXT_CHARACTERS_MAX: Final = 4096
"""The limit of a file's path."""

SHOWN_CHARACTERS_MAX: Final = 300
"""How many characters of a value a refusal shows."""

_SECRET: Final = re.compile("password|secret|token|credential", re.IGNORECASE)
_PART_CHARACTERS_MIN: Final = 4
_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)\}|(\w+))", re.ASCII)


class Options:
    """Typed access to ``values``; ``finish`` refuses the keys that were not read."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self.where = where
        self._known: set[str] = set()

    def integer(
        self, key: str, default: int = REQUIRED, *, minimum: int = 0, maximum: int = INTEGER_MAX
    ) -> int:
        """Return an int of ``minimum`` or more. bool and float are refused."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "must be a whole number, without quotes")
        return self._bounded(key, value, value, minimum, maximum)

    def size(
        self,
        key: str,
        default: int = REQUIRED,
        *,
        minimum: int = 0,
        maximum: int = INTEGER_MAX,
        rounds_down: bool = False,
    ) -> int:
        """Return bytes: a whole number, a whole float, or a text with a unit such as ``"8GiB"``.

        ``rounds_down``: accept a float that is not whole, too.
        """
        value = self._get(key, default)
        size = None
        if isinstance(value, str):
            size = None if value.strip().isdecimal() else parse_size(value)
        elif isinstance(value, float):
            if math.isfinite(value) and (rounds_down or value.is_integer()):
                size = int(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = value
        if size is None:
            raise self.error(
                key,
                value,
                "must be a whole number of bytes, without quotes, or a text with a unit such as "
                '"8GiB" or "200GB"',
            )
        return self._bounded(key, value, size, minimum, maximum)

    def number(
        self,
        key: str,
        default: float = REQUIRED,
        *,
        above: float = 0.0,
        minimum: float | None = None,
        maximum: float = SECONDS_MAX,
    ) -> float:
        """Return a float greater than ``above``, or of ``minimum`` or more; at most ``maximum``."""
        return self._number(key, self._get(key, default), above, minimum, maximum)

    def seconds(
        self,
        key: str,
        default: float = REQUIRED,
        *,
        minimum: float | None = None,
        maximum: float = SECONDS_MAX,
    ) -> float:
        """Return seconds: a number above 0, or a text with a unit such as ``"12h"``."""
        value = self._get(key, default)
        if isinstance(value, str):
            value = self._duration(key, value)
        return self._number(key, value, 0.0, minimum, maximum)

    def whole_seconds(
        self, key: str, default: int = REQUIRED, *, minimum: int = 0, maximum: int = INTEGER_MAX
    ) -> int:
        """Return seconds as an int: a whole number, or a text with a unit such as ``"7d"``."""
        given = self._get(key, default)
        if not isinstance(given, str):
            return self.integer(key, default, minimum=minimum, maximum=maximum)
        seconds = self._duration(key, given)
        if not seconds.is_integer():
            raise self.error(key, given, "must be whole seconds")
        return self._bounded(key, given, int(seconds), minimum, maximum)

    def text(self, key: str, default: str = REQUIRED, *, choices: Sequence[str] = ()) -> str:
        """Return a non-empty str, one of ``choices`` if there are any."""
        value = self._get(key, default)
        if not isinstance(value, str) or (not value and default != ""):
            raise self.error(key, value, "must be a non-empty text")
        if len(value) > TEXT_CHARACTERS_MAX:
            raise self.error(key, value, f"must be at most {TEXT_CHARACTERS_MAX} characters long")
        if "\0" in value:
            raise self.error(key, value, "holds a null byte, which no name has. Remove it")
        if not _is_unicode(value):
            raise self.error(
                key,
                value,
                "holds half a character (a lone surrogate). Write the whole character, or choose "
                "another name",
            )
        if choices and value not in choices:
            near = nearest_name(value, choices)
            hint = f" (did you mean {near!r}?)" if near else ""
            raise self.error(key, value, f"must be one of {', '.join(choices)}{hint}")
        return value

    def path(self, key: str) -> str:
        """Return an absolute path, in which ``~``, ``$NAME`` and ``${NAME}`` are replaced.

        A relative one begins in the process's initial working folder.
        """
        given = self.text(key)
        path = _VARIABLE.sub(lambda found: self._variable(key, given, found[1] or found[2]), given)
        if path.startswith("~"):
            path = os.path.expanduser(path)  # noqa: PTH111 - of a text
            if path.startswith("~"):
                raise self.error(
                    key, given, "begins with a home folder that is not known. Write the full path"
                )
        return os.path.abspath(path)  # noqa: PTH100 - of a text

    def flag(self, key: str, *, default: bool = REQUIRED) -> bool:
        """Return a bool; 0, 1 and "true" are refused."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "must be true or false, without quotes")
        return value

    def mapping(self, key: str, *, required: bool = False) -> dict[str, Any]:
        """Return a mapping; a missing key is an empty one, unless it is ``required``."""
        value = self._get(key, REQUIRED if required else {})
        if not isinstance(value, dict):
            raise self.error(key, value, "must be a mapping")
        return value

    def mappings(self, key: str) -> list[dict[str, Any]]:
        """Return a list of mappings; a missing key is an empty list."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(key, value, "must be a list of mappings, one a tier")
        return value

    def has(self, key: str) -> bool:
        """Return whether the key was given (None counts as not given)."""
        return self._values.get(key) is not None

    def is_mapping(self, key: str) -> bool:
        """Return whether the key was given as a mapping."""
        return isinstance(self._values.get(key), dict)

    def allow(self, *keys: str) -> None:
        """Accept keys that are read elsewhere."""
        self._known.update(keys)

    def refuse(self, key: str, remedy: str) -> None:
        """Refuse a key of vLLM's that has no meaning here, with the remedy."""
        if self.has(key):
            raise self.error(key, self._values[key], remedy)
        self._values.pop(key, None)

    def finish(self, ignores: Callable[[str], bool] | None = None) -> None:
        """Refuse every key that was neither read nor allowed, unless ``ignores`` says True."""
        for key in self._values:
            if key in self._known or (ignores is not None and ignores(key)):
                continue
            near = nearest_name(str(key), self._known)
            known = f"remove it. Known keys: {', '.join(sorted(self._known))}."
            hint = f"did you mean {near!r}?" if near else known
            raise refusal(key, f"{self.where}: unknown key {self._unknown(key)}; {hint}")

    def error(self, key: str, value: object, remedy: str) -> ConfigError:
        """Build the refusal of one key."""
        given = self._values.get(key)
        if isinstance(value, int | float) and isinstance(given, str | float):
            value = given  # a size or a duration is shown as it was written
        return refusal(key, f"{self.where}: {key}={shown(value)} {remedy}.")

    def _number(
        self, key: str, value: object, above: float, minimum: float | None, maximum: float
    ) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, value, "must be a number, without quotes")
        if not (value > above if minimum is None else value >= minimum) or value > maximum:
            least = f"above {above:g}" if minimum is None else f"at least {minimum:g}"
            raise self.error(key, value, f"must be {least} and at most {maximum:g}")
        return float(value)

    def _duration(self, key: str, text: str) -> float:
        seconds = parse_duration(text)
        if seconds is None:
            raise self.error(
                key,
                text,
                'must be a number of seconds, without quotes, or a text with a unit such as "30s", '
                '"12h" or "7d"',
            )
        return seconds

    def _unknown(self, key: str) -> str:
        """Return an unread key with its value, unless that may be a secret."""
        value = "not shown" if _SECRET.search(str(key)) else f"value {shown(self._values[key])}"
        return f"{shown(key)} ({value})"

    def _missing(self, key: str) -> ConfigError:
        """Build the refusal of a missing key, with the misspelt one that was probably meant."""
        unread = (given for given in self._values if given not in self._known)
        meant = next((given for given in unread if nearest_name(str(given), (key,))), None)
        if meant is None:
            return refusal(key, f"{self.where}: {key} is missing. Set it.")
        error = refusal(
            key,
            f"{self.where}: {key} is missing, and {self._unknown(meant)} is unknown: did you mean "
            f"{key!r}?",
        )
        error.misspelt = meant
        return error

    def _bounded(self, key: str, given: object, value: int, minimum: int, maximum: int) -> int:
        if not minimum <= value <= maximum:
            is_usual = maximum == INTEGER_MAX and value < minimum
            upper = "" if is_usual else f" and at most {maximum}"
            raise self.error(key, given, f"must be at least {minimum}{upper}")
        return value

    def _variable(self, key: str, given: str, name: str) -> str:
        value = os.environ.get(name)
        if not value:
            raise self.error(
                key,
                given,
                f"names the environment variable {name}, which is not set. Set it, or write the "
                "full path",
            )
        return value

    def _get(self, key: str, default: object) -> Any:  # noqa: ANN401 - the callers check it
        self._known.add(key)
        value = self._values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise self._missing(key)
        return default


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that an unknown one probably meant; None if none is similar."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    if not near and len(name) >= _PART_CHARACTERS_MIN:
        near = [each for each in by_lower if name.lower() in each]
    return by_lower[near[0]] if len(near) == 1 else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the question whether a known name was meant, behind a space; empty if none is near."""
    near = nearest_name(name, known)
    return "" if near is None else f" Did you mean {near!r}?"


def refusal(key: str, text: str) -> ConfigError:
    """Build a refusal that carries the key at fault."""
    error = ConfigError(text)
    error.key = key
    return error


def shown(value: object) -> str:
    """Return a value as a refusal shows it: its Python form, if that is not too long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; a nest
        return f"<{type(value).__name__} too large to show>"
    if len(text) > SHOWN_CHARACTERS_MAX:
        return f"{text[:SHOWN_CHARACTERS_MAX]}... ({len(text)} characters)"
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
