"""An engine that starts waits a moment for the folder's lock, and no longer."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import ConfigError
from kvtier_backends.disk.folder import claim as folder
from kvtier_backends.disk.folder.claim import LOCK_NAME, LOCK_WAIT_S_MAX, Claim  # before patches
from tests.unit.backends._media import start_python
from tests.unit.backends.disk._disk import HOLDER, holding

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


SAME_PROGRAM = "which this same program has made (in a notebook: del llm)"


@pytest.mark.usefixtures("naps")
@pytest.mark.parametrize("engine", ["lives", "has ended", "has the lock itself"])
def test_the_refusal_names_the_process_that_has_the_lock_and_what_to_do(
    tmp_path: Path, engine: str
) -> None:
    """A stopped process ends by no signal but SIGKILL, and its engine's number helps nobody."""
    ended = subprocess.Popen(["/bin/true"])
    ended.wait()  # its number is free, and not given anew so soon
    pid = {"lives": os.getpid(), "has ended": ended.pid, "has the lock itself": 0}[engine]
    with holding(tmp_path / "kv", pid) as holder:
        runs = refusal_of(tmp_path / "kv")
        os.kill(holder.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = refusal_of(tmp_path / "kv")
    go_on = f"Let process {holder.pid} go on with 'kill -CONT {holder.pid}', then stop that engine"
    left = f"and is left of engine process {ended.pid}"
    wanted = {
        "lives": (
            (f"process {pid}", f"Stop that engine, {SAME_PROGRAM}"),
            (f"process {pid}, whose tier's process {holder.pid} is stopped", go_on),
        ),
        "has ended": (
            (f"process {holder.pid}, which runs {left}", f"End it with 'kill -KILL {holder.pid}'"),
            (
                f"process {holder.pid}, which is stopped {left}",
                f"End it with 'kill -KILL {holder.pid}'",
            ),
        ),
        "has the lock itself": (
            (f"process {holder.pid}", "Stop that engine"),
            (f"process {holder.pid}, which is stopped", go_on),
        ),
    }
    for said, (user, remedy) in zip((runs, stopped), wanted[engine], strict=True):
        assert said.startswith(f"is in use by {user}: a disk tier belongs to one engine. {remedy},")


def refusal_of(path: Path) -> str:
    with pytest.raises(ConfigError) as refused:
        claim(path)
    return str(refused.value)


def test_a_lock_that_stays_is_refused_after_a_bounded_wait(tmp_path: Path, naps: Naps) -> None:
    held = claim(tmp_path / "kv")
    open_before = times_open(tmp_path / "kv" / LOCK_NAME)
    with pytest.raises(ConfigError) as refused:
        claim(tmp_path / "kv")
    assert str(refused.value) == (
        f"is in use by process {os.getpid()}: a disk tier belongs to one engine. "
        f"Stop that engine, {SAME_PROGRAM}, or name another folder; data-parallel engines each "
        "need their own, "
        "with {dp_rank} in its name."
    )
    assert sum(naps.seconds) == pytest.approx(LOCK_WAIT_S_MAX)
    assert open_before > 0
    assert times_open(tmp_path / "kv" / LOCK_NAME) == open_before, "the lock file stays open"
    assert held.stands()


def test_an_engine_that_a_notebook_made_before_is_called_its_own(tmp_path: Path) -> None:
    """Its engines are processes that nobody there has seen: their numbers alone say nothing."""
    with (
        holding(tmp_path / "kv"),
        start_python("-c", HOLDER, tmp_path / "kv", "0", stderr=subprocess.PIPE) as second,
    ):
        assert f"Stop that engine, {SAME_PROGRAM}" in second.communicate()[1]


def test_a_folder_in_use_is_trouble_that_may_pass(tmp_path: Path, naps: Naps) -> None:
    """So that an engine may start without the tier: while a rollout goes on, the old one has it."""
    held = claim(tmp_path / "kv")
    with pytest.raises(ConfigError) as refused:
        claim(tmp_path / "kv")
    assert isinstance(refused.value.__cause__, BlockingIOError)
    naps.seconds.clear()
    naps.during[40] = held.release
    assert Claim(str(tmp_path / "kv"), ConfigError, wait_s=45.0).stands()
    assert LOCK_WAIT_S_MAX < sum(naps.seconds) <= 45.0
