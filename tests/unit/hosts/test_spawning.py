"""Processes that end with the one that started them, however that ends. They are real."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from kvtier.hosts import spawning
from kvtier.hosts.spawning import spawn
from tests.support.no_threads import no_threads
from tests.support.patience import PATIENCE_S

PARENT = """
import os, signal, sys, threading
from kvtier.hosts.spawning import spawn
program = (
    "import os, sys; from kvtier.hosts.spawning import end_with_parent;"
    "end_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); sys.stdin.read()"
)
spawn([sys.executable, "-c", program, str(os.getpid())], ())
"""


def test_it_is_there_until_its_parent_is_gone_though_it_is_stopped() -> None:
    """``exec`` is an end too: what runs under that number then knows of no tier."""
    ends = {"killed": "os.kill(os.getpid(), 9)", "exec": "os.execv('/bin/sleep', ['sleep', 'inf'])"}
    for name, end in ends.items():
        parent = subprocess.Popen(
            [sys.executable, "-c", f"{PARENT}sys.stdin.readline()\n{end}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        with parent:
            assert parent.stdin is not None
            assert parent.stdout is not None
            child = os.pidfd_open(int(parent.stdout.readline()))
            signal.pidfd_send_signal(child, signal.SIGSTOP)
            parent.stdin.write(b"\n")
            parent.stdin.flush()
            try:
                assert _has_ended(child), name
            finally:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(child, signal.SIGKILL)
                os.close(child)
                parent.kill()


def _has_ended(process: int) -> bool:
    return bool(select.select([process], [], [], PATIENCE_S)[0])


def test_one_whose_parent_ended_before_it_asked_ends_at_once() -> None:
    """Between its start and its request the kernel would send no signal."""
    program = (
        "from kvtier.hosts.spawning import end_with_parent; import os;"
        "end_with_parent({}); print('lives', flush=True)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program.format(parent)], capture_output=True, check=False
        )
        for parent in (os.getpid(), os.getpid() + 1)
    ]
    assert [(run.returncode, run.stdout.strip()) for run in runs] == [(0, b"lives"), (1, b"")]


def test_a_program_that_cannot_be_started_is_the_callers_error() -> None:
    """And the thread goes on."""
    with pytest.raises(FileNotFoundError):
        spawn(["/nonesuch"], ())
    with spawn(["/bin/cat"], ()) as cat:
        cat.stdin.close()  # type: ignore[union-attr]
    assert cat.returncode == 0


def test_without_a_thread_it_fails_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call once waited for ever: for a thread that had not been started."""
    monkeypatch.setattr(spawning, "_orders", None)

    with no_threads(monkeypatch):
        for _ in range(2):
            with pytest.raises(OSError, match="no thread can be started"):
                spawn(["/bin/true"], ())
            assert spawning._orders is None
    with spawn(["/bin/true"], ()):
        pass


def test_a_fork_of_the_process_starts_its_own() -> None:
    """A fork has none of the threads."""
    program = (
        "import os\n"
        "from kvtier.hosts.spawning import spawn\n"
        "with spawn(['/bin/true'], ()): pass\n"
        "child = os.fork()\n"
        "with spawn(['/bin/true'], ()) as again: pass\n"
        "if not child: os._exit(40 + again.returncode)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert run.stdout.strip() == "40"
