"""What tiers really have, to be compared with what their events tell.

Asked for once nothing is stored or loaded any more. A ``memory`` tier is in this process, a
``disk`` tier writes its index down when it is asked (``SoakedDisk``), and ``fs`` has a file for
each block, whose name is the key. What belongs to other weights is left out: no event is of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.core.generations import mark_of, unmarked
from stress.runtime.backends import KEYS_FOLDER, SoakedMemory, keys_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

MEMORY, FS, DISK = 0, 1, 2
DAMAGED_MAX: Final = 8
NAMES = {MEMORY: "memory", FS: "fs", DISK: "disk"}


class Residency:
    """Compares events with tiers. One thread, the scheduler's."""

    def __init__(self, fs_folder: Path, asking: Path) -> None:
        """``asking``: a folder in which the ``disk`` tier finds what is asked, and answers."""
        self._fs_folder = fs_folder
        self._asking = asking
        self._asked = 0
        os.environ[KEYS_FOLDER] = str(asking)

    def ask(self) -> None:
        """Ask the ``disk`` tier, which answers within a second or two."""
        self._asked += 1
        keys_files(self._asking)[0].write_text(f"{self._asked}")

    def difference(self, told: Mapping[int, set[bytes]], mark: bytes) -> str | None:
        """Return how tiers differ from what was told, "" if they don't; None: no answer yet.

        ``mark`` is that of the weights that the engine has now.
        """
        disk = self._disk_keys()
        if disk is None:
            return None
        there = {MEMORY: SoakedMemory.latest().keys(), DISK: disk, FS: self._fs_keys()}
        found = []
        for tier, keys in there.items():
            ours = set(unmarked([key for key in keys if mark_of(key) == mark], mark))
            missing, untold = told.get(tier, set()) - ours, ours - told.get(tier, set())
            # Whoever shares the folder stores there too: nobody tells of that.
            if missing or (untold and tier != FS):
                found.append(f"{NAMES[tier]}: {len(missing)} not there, {len(untold)} not told")
        return "; ".join(found)

    def _disk_keys(self) -> Iterable[bytes] | None:
        _, answer = keys_files(self._asking)
        lines = answer.read_text().splitlines() if answer.exists() else []
        if not lines or lines[0] != f"{self._asked}":
            return None
        return [bytes.fromhex(line) for line in lines[1:]]

    def damage(self, keys: AbstractSet[bytes], mark: bytes) -> Sequence[bytes]:
        """Damage a few of these blocks of ``fs``; returns their keys."""
        found: list[bytes] = []
        for path in self._fs_files():
            name = bytes.fromhex(path.stem)
            if mark_of(name) != mark or len(found) == DAMAGED_MAX:
                continue
            (key,) = unmarked((name,), mark)
            if key in keys:
                with path.open("r+b") as file:
                    first = file.read(1)
                    file.seek(0)
                    file.write(bytes([first[0] ^ 0xFF]))
                found.append(key)
        return found

    def _fs_keys(self) -> Iterable[bytes]:
        return (bytes.fromhex(path.stem) for path in self._fs_files())

    def _fs_files(self) -> Iterable[Path]:
        for folder, _, names in os.walk(self._fs_folder):
            yield from (Path(folder, name) for name in names if name.endswith(".kv"))
