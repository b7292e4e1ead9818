"""The folders that a replay's tiers write to: claimed before, removed after.

Only the run's own files are removed: a folder that it made, or the contents of one that was empty.
If a folder has contents already, the run is refused, unless everything is to be kept anyway.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PRIVATE_MODE: Final = 0o700
PIECES_DEPTH: Final = 2
"""Levels below a folder at which it is cut into pieces: an ``fs`` tier has thousands there."""

REMOVAL_THREADS: Final = 4


class Folders:
    """The folders of one run. ``keep``: remove nothing, and accept folders that are not empty."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._made: list[Path] = []
        self._were_empty: list[Path] = []

    def claim(self, key: str, name: str) -> None:
        """Make the folder ``name``, or check that it may be used. Raises ``ConfigError``.

        ``key`` is the tier's name for it.
        """
        path = Path(name).absolute()
        try:
            if not path.exists():
                self._make(path)
            elif not path.is_dir():
                raise ConfigError(f"{key}={name!r} is not a folder. Name a folder.")
            elif next(path.iterdir(), None) is None:
                self._were_empty.append(path)
            elif not self._keep:
                raise ConfigError(
                    f"{key}={name!r} is not empty, and a replay removes its files at the end. "
                    "Name a folder that is empty or does not exist, or pass --keep: then the "
                    "contents stay, and blocks that an earlier replay of this trace kept are hits."
                )
        except OSError as error:
            raise ConfigError(
                f"{key}={name!r} cannot be used ({error.strerror or error}). Name another."
            ) from error

    def to_remove(self) -> list[Path]:
        """Return the run's files, in pieces that may be removed in any order."""
        if self._keep:
            return []
        left = self._left()
        for _ in range(PIECES_DEPTH):
            left = [child for path in left for child in _children_or_itself(path)]
        return left

    def remove(self, pieces: Sequence[Path], on_progress: Callable[[int], None]) -> list[str]:
        """Remove the pieces, then their folders; return those that could not be removed.

        It uses several threads, because removing mostly waits for the disk.
        """
        if self._keep:
            return []
        with ThreadPoolExecutor(REMOVAL_THREADS) as threads:
            for _ in threads.map(_remove, pieces):
                on_progress(1)
        left = self._left()
        for path in left:
            _remove(path)
        return [str(path) for path in left if path.exists()]

    def _left(self) -> list[Path]:
        return self._made + [child for path in self._were_empty for child in path.iterdir()]

    def _make(self, path: Path) -> None:
        """Make a folder and its missing parents, and note the uppermost, which will be removed."""
        missing = [path, *(parent for parent in path.parents if not parent.exists())]
        for each in reversed(missing):
            each.mkdir(PRIVATE_MODE)
            if each == missing[-1]:
                self._made.append(each)


def _children_or_itself(path: Path) -> list[Path]:
    if path.is_symlink() or not path.is_dir():
        return [path]
    return list(path.iterdir()) or [path]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)
