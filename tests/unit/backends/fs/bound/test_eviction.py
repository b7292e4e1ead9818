"""Removals from a real folder, each of whose system calls may fail: what is there stays known."""

from __future__ import annotations

import errno
import itertools
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvtier_backends.fs import open_root
from kvtier_backends.fs.bound import eviction
from kvtier_backends.fs.bound.account import Account
from kvtier_backends.fs.bound.eviction import Evicted, evict, scan, walk_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvtier_backends.fs.bound.account import Scanned

GONE = "one_01/abc/de/abcde3.kv"
FILES = ("one_01/abc/de/abcde1.kv", "one_01/abc/de/abcde2.kv", GONE, "two_02_r0/123/45_g0/1.bin")
FILE_BYTES = 100
ERRORS = (errno.EMFILE, errno.EIO, errno.EACCES, errno.ESTALE, errno.EROFS)


class FailingOs:
    """The ``os`` module, of which one call fails: the one with this number. ``close`` closes."""

    def __init__(self, failing: int, error: int) -> None:
        self.calls = 0
        self._failing = failing
        self._error = error

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        return self._counted(found) if name in vars(os) and callable(found) else found

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self.calls += 1
            if self.calls - 1 != self._failing:
                return call(*given, **named)
            if call is os.close:
                call(*given)
            raise OSError(self._error, os.strerror(self._error))

        return counted


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def scanned(folder: Path, root: int) -> Scanned:
    """Fill the folder, and count it; then one of the files goes without anybody's notice."""
    for each in FILES:
        (folder / each).parent.mkdir(parents=True, exist_ok=True)
        (folder / each).write_bytes(bytes(FILE_BYTES))
    found = scan(walk_files(root, "", 0, lambda: True), 10, 5.0)
    (folder / GONE).unlink()
    return found


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def account_after(found: Scanned, evicted: Evicted) -> Account:
    """Return a cleaner's account once this is all that an eviction has reported."""
    account = Account(10 * FILE_BYTES)
    account.scan_begins()
    account.scan_ended(found)
    account.eviction_begins()
    account.removed(np.array(evicted.numbers, np.uint64), evicted.bytes)
    return account


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("folders", [False, True])
def test_whichever_call_of_an_eviction_fails_no_file_that_is_there_is_forgotten(
    error: int, folders: bool, tmp_path: Path, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once nobody counted them, such files were never evicted, and the folder outgrew its bound."""
    for failing in itertools.count():
        found = scanned(tmp_path, root)
        failing_os = FailingOs(failing, error)
        with monkeypatch.context() as faulty:
            faulty.setattr(eviction, "os", failing_os)
            faulty.setattr(open_root, "os", failing_os)
            evicted = evict(root, found.known, folders=folders)
        account = account_after(found, evicted)
        assert account.bound >= on_disk(tmp_path), failing
        there = FILE_BYTES * (len(FILES) - 1)
        assert evicted.bytes == there - on_disk(tmp_path), "the announced ones, and no others"
        assert len(evicted.names) * FILE_BYTES == evicted.bytes
        assert evicted.failed is not None or account.bound == on_disk(tmp_path) == 0
        again = evict(root, account.manifest.entries)
        assert (len(again.numbers), again.failed) == (len(account.manifest), None)
        assert on_disk(tmp_path) == 0
        if failing_os.calls <= failing:
            break  # none did
