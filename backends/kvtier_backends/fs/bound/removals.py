"""Publishes evicted blocks to all engines: the names of their files, in numbered files.

The cleaner writes them and removes old ones; every engine reads those that are new to it, and
reports the loss of those blocks that it has announced, once it has found them gone. So a foreign
file may have any name: the parts of one with a line end in it are no block's, or are checked.
"""

from __future__ import annotations

import re
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.keys import forget_oldest
from kvtier_backends.fs.bound.protocol import REMOVED, ensure_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvtier_backends.fs.bound.protocol import Folder
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
        forget_oldest(self._keys, ANNOUNCED_MAX)

    @contextmanager
    def asked(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Treat these as announced during their lookup: found ones may be evicted meanwhile."""
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


FILES_MAX: Final = 1024
"""Most files kept for engines that are slow to read them: they read once a second."""

UNANNOUNCED_MAX: Final = 1 << 14
"""Most names kept while the folder takes no files. The oldest are forgotten."""

_NAME = re.compile(r"[0-9]{10}-[0-9]{10}")
_UNFINISHED = re.compile(r"\.([0-9]{10})-[0-9]{10}\..+\.tmp")


class Removals:
    """Writes the files: the cleaner's side."""

    def __init__(self) -> None:
        self._term = 0
        self._number = 0
        self._kept: list[str] = []
        self._unannounced: deque[str] = deque(maxlen=UNANNOUNCED_MAX)

    async def begin(self, space: Folder, term: int, number: int = 0) -> None:
        """Begin a term; the first file has the number after this one. Raises ``OSError``."""
        folder = await ensure_folder(space, REMOVED)
        self._term, self._number = term, number
        names = await folder.names()
        self._kept = sorted(filter(_NAME.fullmatch, names))
        for name in names:
            unfinished = _UNFINISHED.fullmatch(name)
            if unfinished and 0 < int(unfinished[1]) < term:  # of a cleaner that no longer leads
                with suppress(FileNotFoundError):
                    await folder.remove(name)

    def note(self, names: Sequence[str]) -> None:
        """Note removed files, to be announced."""
        self._unannounced.extend(names)

    async def announce(self, space: Folder) -> None:
        """Publish the removed names. Raises ``OSError``: then they are published the next time."""
        if not self._unannounced:
            return
        folder = await ensure_folder(space, REMOVED)
        self._number += 1
        name = f"{self._term:010d}-{self._number:010d}"
        await folder.write(name, "\n".join(self._unannounced).encode(errors="surrogateescape"))
        self._unannounced.clear()
        self._kept.append(name)
        while len(self._kept) > FILES_MAX:
            with suppress(FileNotFoundError):
                await folder.remove(self._kept[0])
            del self._kept[0]


class RemovalsReader:
    """Reads the files: an engine's side."""

    def __init__(self) -> None:
        self._seen: set[str] | None = None

    async def new(self, space: Folder) -> list[str]:
        """Return the names of block files that were removed since the last call.

        Raises ``OSError``. Removals before the first call are ignored.
        """
        try:
            folder = await space.open_folder(REMOVED)
        except FileNotFoundError:
            self._seen = self._seen or set()
            return []
        there = set(filter(_NAME.fullmatch, await folder.names()))
        if self._seen is None:
            self._seen = there
            return []
        removed: list[str] = []
        for name in sorted(there - self._seen):
            with suppress(FileNotFoundError):
                removed += (await folder.read(name)).decode(errors="surrogateescape").split("\n")
            self._seen.add(name)
        self._seen &= there
        return removed
