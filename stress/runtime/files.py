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
    from collections.abc import Mapping, Sequence

    from stress.plan import Fault

FILES_AT_ONCE: Final = 25
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

    def __init__(self, folders: Mapping[str, Path], aside: Path) -> None:
        """``aside``: an empty folder for what is moved away, on the same filesystem."""
        self._folders = folders
        self._aside = aside
        self._moved: dict[str, tuple[str, Path]] = {}  # target → the fault, where its folder is
        self._moves = 0
        self._special: dict[str, list[Path]] = {}  # fault → what it has put there

    def begin(self, fault: Fault) -> int:
        """Do a fault; returns how many wrongs that was."""
        folder = self._folders[fault.target]
        if fault.kind == "harm_files":
            return harm_some_files(folder, fault.dice)
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
                _replace(folder, away, fault.dice)
            return 1
        return 0

    def end(self, fault: Fault) -> None:
        """Take special files away; or put the folder back to where it was.

        What has come there instead goes aside. kvtier takes neither away: it refuses them.
        """
        for path in self._special.pop(fault.seed, ()):
            _take_away(path)
        away = None
        if self._moved.get(fault.target, ("", None))[0] == fault.seed:
            _, away = self._moved.pop(fault.target)
        if away is None:
            return
        folder = self._folders[fault.target]
        with suppress(FileNotFoundError):
            folder.rename(away.with_name(f"{away.name}-instead"))
        away.rename(folder)

    def _put_special_files(self, fault: Fault) -> int:
        chosen = some_files(self._folders[fault.target], fault.dice, SPECIAL_AT_ONCE)
        for path in chosen:
            self._special.setdefault(fault.seed, []).append(path)
            with suppress(OSError):  # the tier was quicker
                put_something_special(path, fault.dice.randrange(3))
        return len(chosen)


def _take_away(path: Path) -> None:
    """Remove what is no file."""
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


def harm_some_files(folder: Path, dice: random.Random) -> int:
    """Damage, cut or delete some of the files in a folder; returns how many."""
    harmed = 0
    for path in some_files(folder, dice, FILES_AT_ONCE):
        with suppress(OSError):  # the tier was quicker
            _harm(path, dice)
            harmed += 1
    return harmed


def some_files(folder: Path, dice: random.Random, count: int) -> list[Path]:
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
        if path.is_file() and path.name != NAMESPACE_FILE:
            found.append(path)
    return found


def _harm(path: Path, dice: random.Random) -> None:
    """Do one of three things to a file."""
    kind = dice.randrange(3)
    if kind == 0:
        path.unlink()
    elif kind == 1:
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
