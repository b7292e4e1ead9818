"""Starts the programs of servers on loopback, which end with the test whatever happens to it.

The kernel kills a program when the process that has started it ends, however that ends.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

from kvtier.tools.process_group import process_group
from tests.support.other_processes import state_of
from tests.support.patience import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

HOST: Final = "127.0.0.1"

_ENDS_WITH_ITS_PARENT: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):  # it has ended before that
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_LAST_WORDS_CHARACTERS: Final = 2000


PORTS: Final = range(18_000, 32_000)
"""Below those that a system gives to connections of its own, above those that Mooncake draws."""

HELD_MAX: Final = 256
"""So many of the last ports are held. What had one before has ended long ago, or listens there."""

_ports = itertools.count(os.getpid() * 61)
_held: deque[int] = deque()  # descriptors


def ending_with_this_process(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a program, and has the kernel kill it when this process ends."""
    return [sys.executable, "-ISc", _ENDS_WITH_ITS_PARENT, str(os.getpid()), *arguments]


def free_port() -> int:
    """Return a port that nobody listens on, and that nobody else gets before it is taken.

    It stays bound here, without listening: connections to it are refused, and no other process is
    given it. A server may listen there all the same, now and whenever it starts again, since all
    servers set ``SO_REUSEADDR``, and so does, from then on, the one who holds it.
    """
    while True:
        port = PORTS[next(_ports) % len(PORTS)]
        holder = socket.socket()
        try:
            holder.bind((HOST, port))  # without SO_REUSEADDR: refused if another one holds it
        except OSError:
            holder.close()
            continue
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _held.append(holder.detach())
        if len(_held) > HELD_MAX:
            os.close(_held.popleft())
        return port


class ServerProgram:
    """A server's process, which may be stopped, killed and started again."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        port: int | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``log``: where what it says goes. ``port``: where it listens, if anybody waits for it."""
        self.port = port
        self._arguments = arguments
        self._log = log
        self._environment = environment or {}
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, waits: bool = True) -> None:
        """Start it, and wait until it listens. ``waits``: False for one that may listen later."""
        with self._log.open("ab") as log:
            self._process = self._stack.enter_context(
                process_group(
                    ending_with_this_process(self._arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._environment},
                )
            )
        if waits and self.port is not None:
            until(self._listens, self._last_words)

    def kill(self) -> None:
        """End it as a power cut would. One that does not run is no error."""
        self._stack.close()
        self._process = None

    def stop(self) -> None:
        """Let it hang: the kernel goes on taking connections for it."""
        self._signal(signal.SIGSTOP)
        until(lambda: state_of(self._running.pid) == "T")

    def go_on(self) -> None:
        """Let it answer again."""
        self._signal(signal.SIGCONT)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Let it hang until the end of the block."""
        self.stop()
        try:
            yield
        finally:
            self.go_on()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it does not run"
        return self._process

    def _signal(self, number: int) -> None:
        self._running.send_signal(number)

    def _listens(self) -> bool:
        status = self._running.poll()
        assert status is None, f"it has ended with status {status}: {self._last_words()}"
        with socket.socket() as tried:
            return tried.connect_ex((HOST, self.port)) == 0

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-_LAST_WORDS_CHARACTERS:]
