"""Processes that store into one folder, which are killed at random, and the folder's measure."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier_backends.fs.bound.protocol import SPACE

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

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


class KilledEngines:
    """Engines of which one is killed every now and then. Any thread may ask."""

    def __init__(
        self, make: Callable[[], StoringEngine], count: int, pause_s: float, chance: Random
    ) -> None:
        """Start so many. ``pause_s``: between two kills, on average."""
        self._make = make
        self._pause_s = pause_s
        self._chance = chance
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._ended = 0  # stored by those that were killed
        self.start_s = time.monotonic()
        self.kills_s: list[float] = []  #: since the start
        self._engines = [make() for _ in range(count)]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stored(self) -> int:
        """Return how many blocks all have stored. Raises ``RuntimeError`` if an engine failed."""
        with self._lock:
            if not all(each.is_alive() for each in self._engines):
                raise RuntimeError("an engine failed: see above")
            return self._ended + sum(each.stored for each in self._engines)

    def stop(self) -> None:
        """Kill all."""
        self._is_over.set()
        self._thread.join()
        for engine in self._engines:
            engine.kill()

    def _run(self) -> None:
        while not self._is_over.wait(self._chance.expovariate(1 / self._pause_s)):
            with self._lock:
                place = self._chance.randrange(len(self._engines))
                engine = self._engines[place]
                engine.kill()
                self.kills_s.append(time.monotonic() - self.start_s)
                self._ended += engine.stored
                self._engines[place] = self._make()
