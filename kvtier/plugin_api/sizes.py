"""Reads and shows sizes and durations as people write them."""

from __future__ import annotations

import re
import time
from typing import Final

from kvtier.errors import ConfigError

_UNITS: Final[dict[str, int]] = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
_SIZE: Final = re.compile(r"\s*([0-9]{1,18})(?:\.([0-9]{1,18}))?\s*([a-zA-Z]*)\s*", re.ASCII)

_SECONDS: Final = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION: Final = re.compile(
    rf"\s*([0-9]{{1,9}}(?:\.[0-9]{{1,9}})?)\s*({'|'.join(_SECONDS)})\s*", re.ASCII | re.IGNORECASE
)

_UNIT: Final = 1024
_LETTERS: Final = "KMGTP"
_AGES: Final = (("d", 86_400), ("h", 3600), ("min", 60))


def shown_bytes(size: float) -> str:
    """Return a number of bytes in the largest unit that fits, with a digit behind the point."""
    if size < _UNIT:
        return "1 byte" if size == 1 else f"{size:.0f} bytes"
    power = 0
    while size >= _UNIT and power < len(_LETTERS):
        size /= _UNIT
        power += 1
    return f"{size:,.1f} {_LETTERS[power - 1]}iB"


def shown_age(since_s: int | None) -> str:
    """Return how long ago a time was, in the largest unit that fits; "-" for None."""
    if since_s is None:
        return "-"
    seconds = max(0, int(time.time()) - since_s)
    for unit, length in _AGES:
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds} s"


def parse_duration(text: str) -> float | None:
    """Return the duration in seconds; None if the text is not one, or has no unit."""
    found = _DURATION.fullmatch(text)
    return None if found is None else float(found[1]) * _SECONDS[found[2].lower()]


def parse_size(text: str) -> int | None:
    """Return the size in bytes, rounded down; None if the text is not a size."""
    found = _SIZE.fullmatch(text)
    unit = None if found is None else _UNITS.get(found[3].lower())
    if found is None or unit is None:
        return None
    fraction = found[2] or ""
    # In whole numbers: a float has no room for all sizes.
    digits = int(found[1] + fraction)
    return digits * unit // int("1" + "0" * len(fraction))


def read_bytes(text: str, name: str) -> int:
    """Return the size in bytes. Raises ``ConfigError``, which calls it ``name``."""
    size = parse_size(text)
    if size is None:
        raise ConfigError(f"{name}={text!r} is not a size. Write one such as 16KiB, 2GiB or 4096.")
    return size
