"""A server's process on loopback, which the soak's supervisor ends, too, whatever happens."""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from kvtier.tools.process_group import process_group
from stress.failure import Failure
from stress.limits import PATIENCE_S
from stress.ports import HOST

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

POLL_S: Final = 0.01
LAST_WORDS_CHARACTERS: Final = 2000


class ServerProcess:
    """One server, which may be killed and started again. One thread."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        port: int,
        log: Path,
        start_timeout_s: float = PATIENCE_S,
    ) -> None:
        """``name``: for people. ``port``: where it listens. ``log``: where its output goes."""
        self.process: subprocess.Popen[bytes] | None = None  #: None: it does not run
        self._name = name
        self._arguments = arguments
        self._port = port
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._stack = ExitStack()

    def start(self) -> None:
        """Start it, and wait until it listens. Raises ``Failure`` if it doesn't."""
        with self._log.open("ab") as log:
            group = process_group(self._arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            self.process = self._stack.enter_context(group)
        end_s = time.monotonic() + self._start_timeout_s
        while not self._listens():
            if time.monotonic() > end_s or self.process.poll() is not None:
                text = self._log.read_text(errors="replace")[-LAST_WORDS_CHARACTERS:]
                raise Failure(f"{self._name} does not start: {text}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """End it as a power cut would. One that does not run is no error."""
        self._stack.close()
        self.process = None

    def _listens(self) -> bool:
        with socket.socket() as tried:
            return tried.connect_ex((HOST, self._port)) == 0
