"""Reads one mapping of configuration keys, and refuses what it does not know.

Used for ``kv_connector_extra_config`` and for each entry of
``secondary_tiers``. Every refusal is a ``ConfigError`` that names the key, the
value and the remedy.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REQUIRED: Any = object()


class Options:
    """Typed access to ``values``; ``finish`` refuses the keys that nobody asked for."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = dict(values)
        self.where = where
        self._known: set[str] = set()

    def integer(
        self, key: str, default: int = REQUIRED, *, minimum: int = 0, maximum: int | None = None
    ) -> int:
        """Return an int of ``minimum`` or more. bool and float are refused."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, value, "must be a whole number, without quotes")
        if value < minimum or (maximum is not None and value > maximum):
            upper = "" if maximum is None else f" and at most {maximum}"
            raise self.error(key, value, f"must be at least {minimum}{upper}")
        return value

    def number(
        self, key: str, default: float = REQUIRED, *, above: float = 0.0, maximum: float = 1e18
    ) -> float:
        """Return a float greater than ``above`` and at most ``maximum``."""
        value = self._take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, value, "must be a number, without quotes")
        if not above < value <= maximum:
            raise self.error(key, value, f"must be above {above:g} and at most {maximum:g}")
        return float(value)

    def text(self, key: str, default: str = REQUIRED, *, choices: Sequence[str] = ()) -> str:
        """Return a non-empty str, one of ``choices`` if there are any."""
        value = self._take(key, default)
        if not isinstance(value, str) or (not value and default != ""):
            raise self.error(key, value, "must be a non-empty text")
        if choices and value not in choices:
            raise self.error(key, value, f"must be one of {', '.join(choices)}")
        return value

    def flag(self, key: str, *, default: bool = REQUIRED) -> bool:
        """Return a bool; 0, 1 and "true" are refused."""
        value = self._take(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "must be true or false, without quotes")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a mapping; a missing key is an empty one."""
        value = self._take(key, {})
        if not isinstance(value, dict):
            raise self.error(key, value, "must be a mapping")
        return value

    def mappings(self, key: str) -> list[dict[str, Any]]:
        """Return a list of mappings; a missing key is an empty list."""
        value = self._take(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.error(key, value, "must be a list of mappings, one a tier")
        return value

    def has(self, key: str) -> bool:
        """Tell whether the key was given (None counts as not given)."""
        return self._values.get(key) is not None

    def is_mapping(self, key: str) -> bool:
        """Tell whether the key was given as a mapping."""
        return isinstance(self._values.get(key), dict)

    def allow(self, *keys: str) -> None:
        """Accept keys that somebody else reads."""
        self._known.update(keys)

    def refuse(self, key: str, remedy: str) -> None:
        """Refuse a key of vLLM's that has no meaning here, with what to do instead."""
        if self.has(key):
            raise self.error(key, self._values[key], remedy)
        self._values.pop(key, None)

    def finish(self) -> None:
        """Refuse every key that was neither read nor allowed."""
        for key in self._values:
            if key not in self._known:
                near = difflib.get_close_matches(key, self._known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "remove it."
                raise ConfigError(
                    f"{self.where}: unknown key {key!r} (value {self._values[key]!r}); {hint} "
                    f"Known keys: {', '.join(sorted(self._known))}."
                )

    def error(self, key: str, value: object, remedy: str) -> ConfigError:
        """Build the refusal of one key."""
        return ConfigError(f"{self.where}: {key}={value!r} {remedy}.")

    def _take(self, key: str, default: object) -> Any:  # noqa: ANN401 - the callers check it
        self._known.add(key)
        value = self._values.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ConfigError(f"{self.where}: {key} is missing. Set it.")
        return default
