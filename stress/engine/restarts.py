"""The server is killed, or told to end, and started again on the same folders."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Final

from stress.engine.processes import (
    names_in_shared_memory,
    processes_of,
    role_of,
    roles_in,
)
from stress.engine.resets import check_log
from stress.engine.tools import blocks_listed
from stress.engine.watch import DISK, SCRAPE_S, TIERS, blocks_from
from stress.failure import Failure
from stress.runtime.processes import tier_processes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stress.engine.faults import UnderWay
    from stress.engine.vllm_server import Server
    from stress.engine.watch import Watch
    from stress.plan import Fault
    from stress.record import Record

FIRST_S: Final = 60.0  #: before that, there is little to find again
APART_S: Final = 240.0
NOT_IN_THE_LAST_S: Final = 45.0
END_S_MAX: Final = 120.0
LEFT_S_MAX: Final = 20.0
BACK_S_MAX: Final = 60.0
BUSY_FACTOR: Final = 4.0
POLL_S: Final = 0.1
ENGINE_ROLES: Final = ("kvtier-", "VLLM::")  #: how what is not the HTTP server is called


class Restarts:
    """Does them, and sees that nothing of the old server is left, and its blocks are."""

    def __init__(
        self,
        running: Server,
        watch: Watch,
        under_way: UnderWay,
        record: Record,
        now_s: Callable[[], float],
        *,
        disk: Path,
        engine_id: str,
    ) -> None:
        self.log_from = 0  #: where the log of the server that runs now begins, once it is up
        self._server = running
        self._watch = watch
        self._under_way = under_way
        self._record = record
        self._now_s = now_s
        self._disk = disk
        self._engine_id = engine_id
        self._not_before_s = FIRST_S

    async def do(self, fault: Fault) -> int:
        """Restart once; 0: it is too early for that, or too late. Raises ``Failure``."""
        now_s = self._now_s()
        if now_s < self._not_before_s or now_s > self._record.planned_s - NOT_IN_THE_LAST_S:
            return 0
        async with self._under_way.alone(*TIERS):
            await self._see_put_right()
            began_s = time.monotonic()
            await self._end(fault)
            blocks = await blocks_listed(self._disk)
            await self._server.start()
            self.log_from = self._server.log_bytes()
            await self._see_recovered(blocks)
            longest = max(
                self._record.figures.get("longest restart, s", 0.0), time.monotonic() - began_s
            )
            self._record.figures["longest restart, s"] = round(longest, 1)
        self._not_before_s = self._now_s() + APART_S
        return 1

    async def _see_put_right(self) -> None:
        """Wait until the disk tier has put right, or begun anew, what the last fault did to it."""
        end_s = time.monotonic() + BACK_S_MAX
        while True:
            try:
                await blocks_listed(self._disk)
            except Failure:
                if time.monotonic() > end_s:
                    raise
            else:
                return
            await asyncio.sleep(POLL_S)

    async def _end(self, fault: Fault) -> None:
        """End it in one of three ways, and see that all of it has gone."""
        running, session = self._server, self._server.pid
        check_log(running.log(self.log_from))
        running.begin_outage()
        if fault.dice.random() < 0.5:  # a process that is stopped can't see that its engine ended
            for pid in tier_processes(fault.dice.choice(TIERS), processes_of(session)):
                os.kill(pid, signal.SIGSTOP)
        if fault.target == "all_killed":
            os.killpg(session, signal.SIGKILL)
        elif fault.target == "terminated":
            os.kill(session, signal.SIGTERM)
        else:
            for pid in processes_of(session):
                if "EngineCor" in role_of(pid):
                    os.kill(pid, signal.SIGKILL)
        if fault.target == "terminated":
            # vLLM's HTTP server goes on as long as clients wait for answers, which don't come any
            # more: a service manager kills it.
            await self._see_gone(session, END_S_MAX, ENGINE_ROLES)
            running.kill()
        await running.wait_until_ended(END_S_MAX)
        await self._see_gone(session, LEFT_S_MAX)
        self._watch.server_ended()

    async def _see_gone(
        self, session: int, within_s: float, roles: tuple[str, ...] = ("",)
    ) -> None:
        """Wait until the processes of these roles have ended, as vLLM told them."""
        end_s = time.monotonic() + within_s
        while left := [role for role in roles_in(session) if role.startswith(roles)]:
            if time.monotonic() > end_s:
                raise Failure(f"{within_s:g} s after the server was to end there still are {left}")
            await asyncio.sleep(POLL_S)

    async def _see_recovered(self, blocks: int) -> None:
        """See that the disk tier found what ``kvtier ls`` did, and that it serves again."""
        left = names_in_shared_memory(self._engine_id)
        if left:
            raise Failure(f"in shared memory after a restart: {left}")
        await self._until(self._disk_counts, "the disk tier counts nothing")
        # ``kvtier ls`` lists evicted blocks, too, as long as their region stands.
        found = self._watch.since_start("kvtier:disk_blocks_recovered", tier=DISK)
        over = self._watch.since_start("kvtier:disk_recovery", tier=DISK, case="entries_over")
        if found + over != blocks:
            raise Failure(
                f"a restart found {found:g} blocks on the disk and {over:g} too many, "
                f"kvtier ls {blocks}"
            )
        before = blocks_from(self._watch, DISK)
        await self._until(
            lambda: blocks_from(self._watch, DISK) > before, "the disk tier serves nothing"
        )

    def _disk_counts(self) -> bool:
        return self._watch.gauge("kvtier:disk_blocks", tier=DISK) is not None

    async def _until(self, done: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + BACK_S_MAX * BUSY_FACTOR
        while not done():
            if time.monotonic() > end_s:
                raise Failure(f"{what} {BACK_S_MAX * BUSY_FACTOR:g} s after a restart")
            await asyncio.sleep(SCRAPE_S)
