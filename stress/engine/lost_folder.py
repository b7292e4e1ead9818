"""An operator: does what a tier's log asks for when another folder has taken its folder's place."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from stress.engine.processes import processes_of
from stress.engine.watch import FS
from stress.runtime.processes import tier_processes

if TYPE_CHECKING:
    from stress.engine.faults import UnderWay
    from stress.engine.vllm_server import Server

ASKED_FOR: Final = "to use the folder that is there now, restart the engine"
LOOKS_S: Final = 2.0


class Operator:
    """Starts the process of an ``fs`` tier again that waits for a folder nobody brings back."""

    def __init__(self, running: Server, under_way: UnderWay) -> None:
        self.started_again = 0
        self._server = running
        self._under_way = under_way
        self._is_asked = False
        self._read_bytes = running.log_bytes()

    async def run(self) -> None:
        """Look after the tier until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOKS_S)

    def look(self) -> None:
        """Read what is new in the log, and act once nothing is done to the tier any more."""
        halfway = max(0, self._read_bytes - len(ASKED_FOR) + 1)
        self._read_bytes = self._server.log_bytes()
        self._is_asked |= ASKED_FOR in self._server.log(halfway)
        if self._is_asked and not self._under_way.touched(FS, within_s=LOOKS_S):
            self._is_asked = False
            for pid in tier_processes(FS, processes_of(self._server.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self.started_again += 1
