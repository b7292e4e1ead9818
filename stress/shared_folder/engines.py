"""Starts and kills processes that store into one folder, and measures the folder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from kvtier_backends.fs.bound.protocol import SPACE

_REPOSITORY: Final = Path(__file__).parents[2]
_SUFFIXES: Final = (".kv", ".bin", ".tmp")
_SETTLED_NS: Final = 100_000_000  # two changes within the clock's tick look like one


class FolderMeasure:
    """Measures what the block files below a root take, unfinished ones too: bytes.

    A folder that has not changed since it was listed is not listed again, but for those of the
    protocol, where files grow.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._listed: dict[str, tuple[int, int, list[str]]] = {}

    def bytes(self) -> int:
        """Return what is there now. It takes a while, and is no moment's view."""
        return self._measure(self._root)

    def _measure(self, path: str) -> int:
        total = 0
        with suppress(FileNotFoundError):
            changed_ns = os.stat(path).st_mtime_ns  # noqa: PTH116 - a million times
            known = self._listed.get(path)
            if known is None or known[0] != changed_ns or f"/{SPACE}" in path:
                known = (changed_ns, *_list(path))
                if time.time_ns() - changed_ns > _SETTLED_NS:
                    self._listed[path] = known
            total = known[1] + sum(self._measure(f"{path}/{name}") for name in known[2])
        return total


def _list(path: str) -> tuple[int, list[str]]:
    """Return the bytes of the files in a folder, and the folders in it."""
    total, folders = 0, []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            elif entry.name.endswith(_SUFFIXES) and not entry.name.startswith("."):
                with suppress(FileNotFoundError):
                    total += entry.stat(follow_symlinks=False).st_size
    return total, folders


class StoringEngine:
    """One process, and how many blocks it has stored."""

    def __init__(self, root: Path, capacity: int, seed: int, blocks: int) -> None:
        self.stored = 0
        paths = [str(_REPOSITORY), str(_REPOSITORY / "backends"), *sys.path]
        given = (str(root), str(capacity), str(seed), str(blocks))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stress.shared_folder.storing", *given],
            cwd=_REPOSITORY,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def is_alive(self) -> bool:
        """Tell whether it runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it at once, in the middle of whatever it does."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                if line.strip().isdecimal():
                    self.stored += int(line)
                else:
                    print(line, end="")  # the engine's log
