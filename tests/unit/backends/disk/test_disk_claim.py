"""An engine that starts waits a moment for the folder's lock, and no longer."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError
from kvtier_backends.disk import folder
from kvtier_backends.disk.folder import LOCK_NAME, LOCK_WAIT_S_MAX, Claim  # before patches

if TYPE_CHECKING:
    from collections.abc import Callable


class Naps:
    """Takes the place of the clock: counts the waiting, and does something in between."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds: list[float] = []
        self.during: dict[int, Callable[[], None]] = {}
        monkeypatch.setattr(folder, "LOCK_WAIT_S_MAX", LOCK_WAIT_S_MAX)
        monkeypatch.setattr(folder, "time", SimpleNamespace(sleep=self.sleep))

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.during.get(len(self.seconds), lambda: None)()


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> Naps:
    return Naps(monkeypatch)


def claim(path: Path) -> Claim:
    return Claim(str(path), ConfigError)


def times_open(path: Path) -> int:
    """How many of this process's descriptors are of that file; others come and go meanwhile."""
    return sum(link.resolve() == path.resolve() for link in Path("/proc/self/fd").iterdir())


def test_a_free_folder_is_claimed_without_a_wait(tmp_path: Path, naps: Naps) -> None:
    assert claim(tmp_path / "kv").stands()
    assert naps.seconds == []


def test_a_lock_that_is_let_go_during_the_wait_is_taken(tmp_path: Path, naps: Naps) -> None:
    """A killed engine's goes some milliseconds after it."""
    before = claim(tmp_path / "kv")
    naps.during[3] = before.release
    after = claim(tmp_path / "kv")
    assert after.stands()
    assert len(naps.seconds) == 3
    naps.during.clear()
    with pytest.raises(ConfigError, match="in use"):
        claim(tmp_path / "kv")


def test_a_look_at_the_lock_keeps_no_engine_from_starting(tmp_path: Path, naps: Naps) -> None:
    """``kvtier ls`` and ``fsck`` take it, shared, to see whether somebody has it."""
    claim(tmp_path / "kv").release()
    looking = os.open(tmp_path / "kv" / "lock", os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    naps.during[1] = lambda: os.close(looking)
    assert claim(tmp_path / "kv").stands()


@pytest.mark.usefixtures("naps")
def test_a_claim_names_the_engine_though_the_tier_runs_elsewhere(tmp_path: Path) -> None:
    held = Claim(str(tmp_path / "kv"), ConfigError, user_pid=4711)
    with pytest.raises(ConfigError, match="is in use by process 4711:"):
        claim(tmp_path / "kv")
    assert held.stands()


def test_a_lock_that_stays_is_refused_after_a_bounded_wait(tmp_path: Path, naps: Naps) -> None:
    held = claim(tmp_path / "kv")
    open_before = times_open(tmp_path / "kv" / LOCK_NAME)
    with pytest.raises(ConfigError) as refused:
        claim(tmp_path / "kv")
    assert str(refused.value) == (
        f"is in use by process {os.getpid()}: a disk tier belongs to one engine. "
        "Stop that engine, or name another folder; data-parallel engines each need their own, "
        "with {dp_rank} in its name."
    )
    assert sum(naps.seconds) == pytest.approx(LOCK_WAIT_S_MAX)
    assert open_before > 0
    assert times_open(tmp_path / "kv" / LOCK_NAME) == open_before, "the lock file stays open"
    assert held.stands()
