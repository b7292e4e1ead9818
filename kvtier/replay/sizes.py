"""Reads sizes as people write them: ``16KiB``, ``2GB``, ``4096``."""

from __future__ import annotations

import re
from typing import Final

from kvtier.errors import ConfigError

_UNITS: Final = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE: Final = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([a-zA-Z]*)\s*")


def read_bytes(text: str, name: str) -> int:
    """Return the size in bytes. Raises ``ConfigError``, in which it is called ``name``."""
    found = _SIZE.fullmatch(text)
    unit = None if found is None else _UNITS.get(found[2].lower())
    if found is None or unit is None:
        raise ConfigError(f"{name}={text!r} is not a size. Write one such as 16KiB, 2GiB or 4096.")
    return int(float(found[1]) * unit)
