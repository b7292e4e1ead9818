"""A check of a folder whose files cannot be removed, or are removed by others meanwhile."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from kvtier_backends.fs.offline.checking import Problem, check_folder
from kvtier_backends.fs.offline.inspection import FsFolder
from tests.unit.backends.fs._fs import open_fs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
BLOCKS = 6


async def test_a_damaged_file_that_cannot_be_removed_is_named_and_the_rest_is_repaired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole check once ended there, without a result."""
    async with open_fs(tmp_path / "kv") as fs:
        for number in range(BLOCKS):
            await fs.store(number)
        stuck, taken, repaired = (fs.path(number) for number in range(3))
    for path in (stuck, taken, repaired):
        path.write_bytes(b"torn")
    real = os.unlink

    def unlink(path: str, **given: Any) -> None:
        if path.endswith(stuck.name):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        if path.endswith(taken.name):
            real(taken)  # by an engine that has loaded it
        real(path, **given)

    with FsFolder(os.fspath(tmp_path / "kv")) as folder:
        monkeypatch.setattr("kvtier_backends.fs.offline.inspection.os.unlink", unlink)
        checked = check_folder(folder, lambda: None, repair=True)
        monkeypatch.undo()
        again = check_folder(folder, lambda: None, repair=False)
    assert (checked.blocks, checked.skipped, checked.repaired) == (BLOCKS - 3, 1, 1)
    assert checked.is_complete
    assert checked.cases == {"blocks_damaged": 2}
    name = os.fspath(stuck.relative_to(tmp_path / "kv"))
    reason = "torn: 4 bytes; not removed: Permission denied"
    assert Problem("blocks_damaged", name, reason) in checked.problems
    assert [problem.file for problem in again.problems] == [name]
