"""Tracks the blocks that this engine has announced, so that it can report when they are gone."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvtier_backends.fs.layout import Layout

ANNOUNCED_MAX: Final = 1 << 20
"""The oldest are forgotten first: their loss is not reported."""


class Announced:
    """The blocks that this engine has stored or found. The loop's thread only."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._keys: dict[str, bytes | None] = {}  # by file; None: the name yields the key
        self._asked: list[dict[str, bytes]] = []  # by file, of probes in progress

    def add(self, keys: Iterable[bytes]) -> None:
        """Note blocks that were stored or found."""
        for key in keys:
            name = self._layout.name(key)
            is_told = self._layout.key_of_untrusted(name) == key
            self._keys[name] = None if is_told else key
        while len(self._keys) > ANNOUNCED_MAX:
            del self._keys[next(iter(self._keys))]

    @contextmanager
    def asked(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Treat these as announced during their lookup: blocks that are found may go meanwhile."""
        asked = {self._layout.name(key): key for key in keys}
        self._asked.append(asked)
        try:
            yield
        finally:
            self._asked = [each for each in self._asked if each is not asked]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note blocks that were reported gone."""
        for key in keys:
            self._keys.pop(self._layout.name(key), None)

    def of(self, names: Sequence[str]) -> list[bytes]:
        """Return the keys of those of these files that were announced."""
        found = []
        for name in names:
            if name in self._keys:
                key = self._keys[name] or self._layout.key_of_untrusted(name)
                if key is not None:
                    found.append(key)
            else:
                found += [asked[name] for asked in self._asked if name in asked][:1]
        return found
