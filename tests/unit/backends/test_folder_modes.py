"""Whose a folder is: modes that follow its root, users of one group, mounts open to all."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import Outcome
from kvtier_backends.posix import shared_mode
from tests.support.fuse_folder import fuse_folder
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S
from tests.unit.backends._media import start_python
from tests.unit.backends.disk._disk import make_disk, open_disk
from tests.unit.backends.fs._fs import make_fs, open_fs

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = 3000
KINDS = ["fs", "disk"]
pytestmark = pytest.mark.anyio


@pytest.fixture
def everyones() -> Iterator[Path]:
    """A folder that other users get to.

    Below pytest's own they don't: each run of pytest that begins closes that to them.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # noqa: PTH101 - it is no Path yet
        yield Path(folder)


def made(folder: Path, mode: int) -> Path:
    """Make a root folder, whatever the umask."""
    folder.mkdir()
    os.chown(folder, -1, GROUP)
    folder.chmod(mode)
    return folder


def opened_by(user: int, kind: str, root: Path, stored: int, wanted: int) -> tuple[int, str]:
    """Open a tier as another user of the group; returns the exit status and what was said."""
    with start_python(
        "-m",
        "tests.unit.backends._as_user",
        *(str(user), str(GROUP), kind, str(root), str(stored), str(wanted)),
        stdout=subprocess.PIPE,
    ) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said


def modes_below(root: Path) -> dict[str, set[int]]:
    """Return the modes of the folders and of the files, without the bits that setgid adds."""
    found: dict[str, set[int]] = {"folders": set(), "files": set()}
    for path in root.rglob("*"):
        kind = "folders" if path.is_dir() else "files"
        found[kind].add(stat.S_IMODE(path.stat().st_mode) & 0o777)
    return found


@pytest.mark.parametrize(
    ("folder", "file", "root"),
    [(0o700, 0o600, 0o700), (0o770, 0o660, 0o2770), (0o750, 0o640, 0o750), (0o770, 0o660, 0o777)],
)
def test_modes_follow_the_group_bits_of_the_root_and_never_the_others(
    folder: int, file: int, root: int
) -> None:
    assert (shared_mode(0o700, root), shared_mode(0o600, root)) == (folder, file)


@needs("root")
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_user_of_a_folders_group_reads_and_writes_there(
    kind: str, everyones: Path
) -> None:
    """OpenShift gives each pod a user of its own, and all of them one group."""
    root = made(everyones / "kv", 0o2770)
    assert opened_by(2001, kind, root, 8, 0) == (0, "")
    assert opened_by(2002, kind, root, 8, 8) == (0, "")
    assert opened_by(2001, kind, root, 0, 16) == (0, "")
    modes = modes_below(root)
    assert modes["files"] == {0o660}
    assert modes["folders"] <= {0o770}


@needs("root")
def test_a_user_who_may_only_read_there_has_to_say_so(everyones: Path) -> None:
    root = made(everyones / "kv", 0o2770)
    assert opened_by(2001, "fs", root, 2, 0) == (0, "")
    for path in root.rglob("*"):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o020)
    root.chmod(0o2750)
    status, said = opened_by(2002, "fs", root, 0, 2)
    assert status == 3
    assert "may not read and write" in said
    assert opened_by(2002, "fs-reader", root, 0, 2) == (0, "")


@needs("root")
@pytest.mark.parametrize("below", ["", "/writers"])
def test_the_refusal_of_another_users_folder_names_that_folder(below: str, everyones: Path) -> None:
    root = made(everyones / "kv", 0o2770)
    assert opened_by(2001, "fs", root, 1, 0) == (0, "")
    (base,) = root.iterdir()
    theirs = f"{base}{below}"
    os.chmod(theirs, 0o700)  # noqa: PTH101 - as an older kvtier made it
    status, said = opened_by(2002, "fs", root, 1, 0)
    assert status == 3
    for word in (theirs, "user 2001", "mode 0700", "chmod -R g+rwX", "umask 007"):
        assert word in said, said


@needs("root")
def test_the_refusal_of_another_users_disk_folder_names_the_file(everyones: Path) -> None:
    root = made(everyones / "kv", 0o2770)
    assert opened_by(2001, "disk", root, 1, 0) == (0, "")
    (root / "lock").chmod(0o600)
    status, said = opened_by(2002, "disk", root, 1, 0)
    assert status == 3
    assert f"{root}/lock" in said


@needs("fuse")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_mount_that_is_open_to_all_is_used_if_that_is_said(
    kind: str, tmp_path: Path
) -> None:
    """SMB, Azure Files, gcsfuse: all folders have one mode, and chmod does nothing."""
    make: Any = make_fs if kind == "fs" else make_disk
    opening: Any = open_fs if kind == "fs" else open_disk
    with fuse_folder(tmp_path) as folder:
        folder.begin("open", "open_to_all", "getattr")
        with pytest.raises(ConfigError, match="set allow_world_writable to true"):
            make(folder.path / "kv")
        async with opening(folder.path / "kv", allow_world_writable=True) as tier:
            ends = await tier.store(1)
            assert ends in (Outcome.DONE, [Outcome.DONE])
        async with opening(folder.path / "kv", allow_world_writable=True) as tier:
            ends = await tier.load(1)
            assert ends in (Outcome.DONE, [Outcome.DONE])
