"""A second engine for a while: on the same ``fs`` folder, and on the ``disk`` folder in vain."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from stress.engine.clients import Clients
from stress.engine.vllm_server import StartFailed, server
from stress.engine.watch import TIERS, Watch
from stress.failure import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from stress.engine.faults import UnderWay
    from stress.engine.questions import Question
    from stress.plan import Fault
    from stress.record import Record

FIRST_S: Final = 60.0
APART_S: Final = 300.0
SERVES_S: Final = 15.0
CLIENTS: Final = 4
NOT_IN_THE_LAST_S: Final = 120.0
READ: Final = "vllm:kv_offload_tiering_read_bytes"
REFUSED: Final = "a disk tier belongs to one engine"


class Neighbours:
    """Starts second engines, each with a short life."""

    def __init__(  # noqa: PLR0913 - all that an engine needs, and when
        self,
        configs: Mapping[str, Mapping[str, Any]],
        model: Path,
        questions: Sequence[Question],
        under_way: UnderWay,
        record: Record,
        now_s: Callable[[], float],
        *,
        log: Path,
        engine_id: str,
    ) -> None:
        """``configs``: of a second engine, by the fault's target."""
        self._configs = configs
        self._model = model
        self._questions = questions
        self._under_way = under_way
        self._record = record
        self._now_s = now_s
        self._log = log
        self._engine_id = engine_id
        self._not_before_s = FIRST_S

    async def do(self, fault: Fault) -> int:
        """Have a second engine; 0: it is too early for one, or too late. Raises ``Failure``."""
        now_s = self._now_s()
        if now_s < self._not_before_s or now_s > self._record.planned_s - NOT_IN_THE_LAST_S:
            return 0
        self._log.unlink(missing_ok=True)
        async with self._under_way.alone(*TIERS):
            if fault.target == "same_fs":
                await self._share(fault)
            else:
                await self._be_refused(fault)
        self._not_before_s = self._now_s() + APART_S
        return 1

    async def _share(self, fault: Fault) -> None:
        """Serve from the same folder, with the same tokens."""
        config = self._configs[fault.target]
        async with server(self._model, config, self._log, f"{self._engine_id}-second") as second:
            await second.wait_until_up()
            clients = Clients(second, self._questions, fault.dice.randrange(1 << 30))
            work = asyncio.create_task(clients.run(CLIENTS))
            try:
                await asyncio.wait([work], timeout=SERVES_S)
                clients.stop()
                await work
            finally:
                work.cancel()
            watch = Watch(second)
            await watch.scrape()
            # After a reset the first engine has keys that no other engine may have.
            if config["on_reset"] == "keep" and not watch.total(READ):
                raise Failure(f"a second engine found nothing in the folder: {clients.counts}")
            await second.stop()

    async def _be_refused(self, fault: Fault) -> None:
        """Start on a folder that is in use: it must say so, and not start."""
        config = self._configs[fault.target]
        try:
            async with server(
                self._model, config, self._log, f"{self._engine_id}-second"
            ) as second:
                await second.wait_until_up()
                raise Failure("a second engine has started on a disk tier's folder that is in use")
        except StartFailed as refused:
            if REFUSED not in self._log.read_text(errors="replace"):
                raise Failure(f"a second engine was refused without a reason: {refused}") from None
