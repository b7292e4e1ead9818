"""Faults of files and folders: harmed behind a tier's back, moved away, replaced."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stress.plan import Kind

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable, Mapping, Sequence

    from stress.plan import Fault

FILES_AT_ONCE: Final = 25
FEW_FILES: Final = 8
GONE_OF_FEW_FRACTION: Final = 0.002
SPECIAL_AT_ONCE: Final = 3
NAMESPACE_FILE: Final = "config.json"  #: without it a folder is somebody else's, and refused


def kinds(tiers: Sequence[str]) -> tuple[Kind, ...]:
    """Return the kinds of faults, for tiers with folders."""
    targets = tuple(tiers)
    return (
        Kind("harm_files", targets, per_minute=900),
        Kind("special_files", targets, per_minute=10, spell_s=(0.1, 3.0)),
        Kind("remove_folder", targets, per_minute=2),
        Kind("move_folder", targets, per_minute=4, spell_s=(0.1, 3.0)),
        Kind("replace_folder", targets, per_minute=4, spell_s=(0.1, 3.0)),
    )


class FolderFaults:
    """Does them, and takes them back. One thread."""

    def __init__(
        self, folders: Mapping[str, Path], aside: Path, spared: frozenset[str] = frozenset()
    ) -> None:
        """``aside``: an empty folder for what is moved away, on the same filesystem.

        ``spared``: the names of files that no harm is done to.
        """
        self._folders = folders
        self._aside = aside
        self._spared = spared | {NAMESPACE_FILE}
        self._moved: dict[str, tuple[str, Path]] = {}  # target → the fault, where its folder is
        self._moves = 0
        self._special: dict[str, list[Path]] = {}  # fault → what it has put there
        self._special_and_away: dict[str, list[Path]] = {}  # target → of faults that have ended

    def begin(self, fault: Fault) -> int:
        """Do a fault; returns how many wrongs that was."""
        folder = self._folders[fault.target]
        if fault.kind == "harm_files":
            return harm_some_files(folder, fault.dice, self._spared)
        if fault.kind == "special_files":
            return self._put_special_files(fault)
        if fault.target in self._moved or not folder.is_dir() or folder.is_symlink():
            return 0
        away = self._aside / f"{fault.kind}-{self._moves}"
        self._moves += 1
        with suppress(FileNotFoundError):
            folder.rename(away)
            if fault.kind == "remove_folder":
                shutil.rmtree(away, ignore_errors=True)
                return 1
            self._moved[fault.target] = (fault.seed, away)
            if fault.kind == "replace_folder":
                with suppress(OSError):  # the tier was quicker, or the disk is full: so much came
                    _replace(folder, away, fault.dice)
            return 1
        return 0

    def end(self, fault: Fault) -> None:
        """Take special files away; or put the folder back to where it was.

        What has come there instead goes aside. kvtier takes neither away: it refuses them.
        But a tier that was started meanwhile may have begun anew: its folder stays.
        """
        special = self._special.pop(fault.seed, [])
        _take_away(special)
        if fault.target in self._moved:  # some may be where the folder is now
            self._special_and_away.setdefault(fault.target, []).extend(special)
        away = None
        if self._moved.get(fault.target, ("", None))[0] == fault.seed:
            _, away = self._moved.pop(fault.target)
        if away is None:
            return
        folder = self._folders[fault.target]
        special = self._special_and_away.pop(fault.target, [])
        if _has_settled(folder, away):
            return
        with suppress(FileNotFoundError):
            folder.rename(away.with_name(f"{away.name}-instead"))
        away.rename(folder)
        _take_away(special)

    def _put_special_files(self, fault: Fault) -> int:
        folder = self._folders[fault.target]
        chosen = some_files(folder, fault.dice, SPECIAL_AT_ONCE, self._spared)
        for path in chosen:
            self._special.setdefault(fault.seed, []).append(path)
            with suppress(OSError):  # the tier was quicker
                put_something_special(path, fault.dice.randrange(3))
        return len(chosen)


def _has_settled(folder: Path, away: Path) -> bool:
    """Tell whether a tier has begun anew: by what it is known by, it would refuse the old one."""
    for found in folder.glob(f"*/{NAMESPACE_FILE}"):
        before = away / found.relative_to(folder)
        if not before.exists() or before.stat().st_mtime_ns != found.stat().st_mtime_ns:
            return True
    return False


def _take_away(paths: Iterable[Path]) -> None:
    """Remove what is no file."""
    for path in paths:
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif not path.is_file() or path.is_symlink():
                path.unlink()


def _replace(folder: Path, away: Path, dice: random.Random) -> None:
    """Put something else where a folder was."""
    kind = dice.choice(["empty", "file", "link", "copy"])
    if kind == "empty":
        folder.mkdir(mode=0o700)
    elif kind == "file":
        folder.write_bytes(b"not a folder")
    elif kind == "link":
        folder.symlink_to(away, target_is_directory=True)
    else:
        shutil.copytree(away, folder, ignore_dangling_symlinks=True, ignore=_special_files)


def _special_files(folder: str, names: list[str]) -> list[str]:
    """Name what can't be copied."""
    paths = [(name, os.path.join(folder, name)) for name in names]  # noqa: PTH118
    return [name for name, path in paths if not (os.path.isfile(path) or os.path.isdir(path))]  # noqa: PTH112, PTH113


def harm_some_files(folder: Path, dice: random.Random, spared: frozenset[str]) -> int:
    """Damage, cut or delete some of the files in a folder; returns how many.

    Where there are a few only, one of them is all that a tier has: they are damaged mostly.
    """
    harmed = 0
    chosen = some_files(folder, dice, FILES_AT_ONCE, spared)
    has_many = len(set(chosen)) > FEW_FILES
    for path in chosen:
        with suppress(OSError):  # the tier was quicker
            _harm(path, dice, gone=2 / 3 if has_many else GONE_OF_FEW_FRACTION)
            harmed += 1
    return harmed


def some_files(folder: Path, dice: random.Random, count: int, spared: frozenset[str]) -> list[Path]:
    """Walk down to ``count`` files at random; fewer are returned where the walk ended nowhere.

    To look at all that there is would take longer than what is to be harmed.
    """
    found = []
    for _ in range(count):
        place = str(folder)
        with suppress(OSError):  # the tier was quicker
            while names := sorted(os.listdir(place)):  # noqa: PTH208 - a thousand times a second
                place = f"{place}/{dice.choice(names)}"
                if not os.path.isdir(place):  # noqa: PTH112 - as above
                    break
        path = Path(place)
        # What is not finished yet begins with the name that it will have.
        if path.is_file() and not path.name.startswith(tuple(spared)):
            found.append(path)
    return found


def _harm(path: Path, dice: random.Random, gone: float) -> None:
    """Damage a file somewhere; or delete or cut it, so often as ``gone`` says."""
    kind = dice.random()
    if kind < gone / 2:
        path.unlink()
    elif kind < gone:
        os.truncate(path, dice.randrange(path.stat().st_size + 1))
    else:
        with path.open("r+b") as file:
            file.seek(dice.randrange(max(1, path.stat().st_size)))
            file.write(bytes([dice.randrange(256)]))


def put_something_special(path: Path, which: int) -> None:
    """Put what is no file in a file's place."""
    path.unlink()
    if which == 0:
        path.mkdir()
    elif which == 1:
        os.mkfifo(path)
    else:
        path.symlink_to("nowhere")
