"""A part of a command that runs in a process group of its own doesn't outlive the call."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from kvtier.tools.process_group import process_group
from tests.support.other_processes import is_running
from tests.support.patience import until

SLEEPER = [sys.executable, "-c", "import time; time.sleep(3600)"]


class InterruptedPopen(subprocess.Popen[bytes]):
    """Is interrupted when the program has started and the caller doesn't know it yet."""

    started: list[int]

    def _execute_child(self, *arguments: Any) -> None:
        super()._execute_child(*arguments)  # type: ignore[misc]
        self.started.append(self.pid)
        signal.raise_signal(signal.SIGINT)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have each start interrupted; return the numbers of the processes."""
    InterruptedPopen.started = []
    monkeypatch.setattr(subprocess, "Popen", InterruptedPopen)
    return InterruptedPopen.started


def test_ctrl_c_while_it_starts_leaves_no_process(started: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), process_group(SLEEPER):
        pytest.fail("Ctrl-C was lost")
    (pid,) = started
    assert not is_running(pid)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_it_runs_ends_it() -> None:
    with pytest.raises(KeyboardInterrupt), process_group(SLEEPER) as child:
        signal.raise_signal(signal.SIGINT)
    assert not is_running(child.pid)


def test_what_it_has_started_ends_with_it() -> None:
    """Also when it has ended itself, and well."""
    program = f"import subprocess; print(subprocess.Popen({SLEEPER!r}).pid)"
    with process_group([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        child.stdout.close()
        child.wait()
    until(lambda: not is_running(grandchild))


def test_a_program_that_is_missing_leaves_ctrl_c_as_it_was() -> None:
    with pytest.raises(FileNotFoundError), process_group(["/no/such/program"]):
        pytest.fail("it can't have started")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_any_thread_may_call_it() -> None:
    ended: list[int] = []

    def call() -> None:
        with process_group([sys.executable, "-c", ""]) as child:
            ended.append(child.wait())

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert ended == [0]
