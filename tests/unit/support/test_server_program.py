"""A server that a test has started ends with it, even if the test is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.other_processes import is_running
from tests.support.patience import until
from tests.support.server_program import ServerProgram, free_port

ROOT = Path(__file__).parents[3]
SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
STARTS_ONE_AND_HANGS = f"""
import pathlib, signal, sys
from tests.support.server_program import ServerProgram
server = ServerProgram({SLEEPER!r}, pathlib.Path(sys.argv[1]), None)
server.start()
print(server._running.pid, flush=True)
signal.pause()
"""


def test_a_server_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTS_ONE_AND_HANGS, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert is_running(pid)
        starter.send_signal(signal.SIGKILL)
    until(lambda: not is_running(pid))


def test_a_server_that_ends_at_once_fails_the_test_with_what_it_said(tmp_path: Path) -> None:
    program = "print('no such setting'); raise SystemExit(3)"
    server = ServerProgram([sys.executable, "-c", program], tmp_path / "log", free_port())
    with pytest.raises(AssertionError, match=r"(?s)status 3: no such setting"):
        server.start()
    server.kill()
