"""The threads that the bound's small files are read and written in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kvtier_backends.fs.bound.protocol import SPACE
from kvtier_backends.fs.bound.small_files import DaemonExecutor
from kvtier_backends.fs.offline.evicting import announce
from kvtier_backends.fs.offline.inspection import FsFolder
from tests.support.no_threads import no_threads
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

THREADS = 2


@pytest.fixture
def executor() -> Iterator[DaemonExecutor]:
    executor = DaemonExecutor(THREADS, "test")
    yield executor
    executor.shutdown()


def test_a_thread_that_cannot_be_started_is_tried_again(
    executor: DaemonExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After as many failures as it has threads, it once started none any more."""
    ran: list[int] = []

    with no_threads(monkeypatch):
        for number in range(THREADS + 1):
            with pytest.raises(OSError, match="no thread can be started"):
                executor.submit(ran.append, number)
    executor.submit(ran.append, 7).result(PATIENCE_S)
    with no_threads(monkeypatch):
        executor.submit(ran.append, 8).result(PATIENCE_S)  # the one that runs does it
    assert ran == [7, 8], "a call that was refused is not made later"


def test_a_removal_that_no_thread_can_announce_is_left_unannounced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It once ended ``kvtier evict`` midway: the blocks after it were never removed."""
    (tmp_path / SPACE).mkdir()
    with no_threads(monkeypatch), FsFolder(str(tmp_path)) as folder:
        announce(folder, ["x"])


def test_it_has_no_more_threads_than_it_may(executor: DaemonExecutor) -> None:
    names = {
        executor.submit(lambda: threading.current_thread().name).result(PATIENCE_S)
        for _ in range(5 * THREADS)
    }
    assert names <= {f"test-{number}" for number in range(THREADS)}
