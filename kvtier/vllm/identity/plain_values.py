"""Turns values in vLLM's configurations into JSON values that are the same in every process.

A namespace is compared as text, between hosts and over restarts. So an address, a counter or the
order of a set must not get into it, and two different values must not become the same text: a
value that can't reliably be turned into JSON is replaced by a unique one (``UNKNOWN``).
"""

from __future__ import annotations

import enum
import hashlib
import json
from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import Any, Final
from uuid import uuid4

from kvtier.plugin_api.log import log

UNKNOWN: Final = "unknown-"
"""Prefix of the replacement for a value that can't be compared: a new one each time."""


def plain(value: Any) -> Any:  # noqa: ANN401, PLR0911 - one return a kind of value
    """Return a configuration's value as JSON values."""
    if isinstance(value, enum.Enum):  # first: some are strings, too
        return plain(value.value) if isinstance(value.value, str) else value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Fraction) or _kind(value) in ("torch.dtype", "torch.device"):
        return str(value)
    if hasattr(value, "to_dict"):
        return plain(value.to_dict())
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    # repr() may contain an address, and a type's name says nothing about the object's content.
    log.warning(
        "a setting of vLLM's can't be compared with another engine's: this engine's blocks are "
        "shared with no other, and none is found after a restart",
        kind=_kind(value),
    )
    return f"{UNKNOWN}{uuid4().hex}"


def _kind(value: Any) -> str:  # noqa: ANN401 - any value
    return f"{type(value).__module__}.{type(value).__qualname__}"


def digest(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return a digest that replaces JSON values too long, or too secret, to be shown."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
