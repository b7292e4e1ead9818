"""Which blocks this engine has said to be in the tier, so that it can say when they are gone."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvtier_backends.fs.layout import Layout

ANNOUNCED_MAX: Final = 1 << 20
"""The oldest are forgotten first: of these, nobody hears."""


class Announced:
    """The blocks that this engine has stored or found. The loop's thread only."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._keys: dict[str, bytes | None] = {}  # by file; None: the name tells the key
        self._asked: list[dict[str, bytes]] = []  # by file, of probes under way

    def add(self, keys: Iterable[bytes]) -> None:
        """Note what was stored or found."""
        for key in keys:
            name = self._layout.name(key)
            is_told = self._layout.key_of_untrusted(name) == key
            self._keys[name] = None if is_told else key
        while len(self._keys) > ANNOUNCED_MAX:
            del self._keys[next(iter(self._keys))]

    @contextmanager
    def asked(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Take these for announced while they are looked for: what is found may go meanwhile."""
        asked = {self._layout.name(key): key for key in keys}
        self._asked.append(asked)
        try:
            yield
        finally:
            self._asked = [each for each in self._asked if each is not asked]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note what is said to be gone."""
        for key in keys:
            self._keys.pop(self._layout.name(key), None)

    def of(self, names: Sequence[str]) -> list[bytes]:
        """Return the keys of these files, as far as they were announced."""
        found = []
        for name in names:
            if name in self._keys:
                key = self._keys[name] or self._layout.key_of_untrusted(name)
                if key is not None:
                    found.append(key)
            else:
                found += [asked[name] for asked in self._asked if name in asked][:1]
        return found
