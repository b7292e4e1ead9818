"""An ``s3`` tier where it runs by default: in a process of its own, or in a thread if told to."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.core import wire
from kvtier.hosts.choose import make_host
from kvtier.hosts.process_host import TierProcess
from kvtier.plugin_api.backend import Outcome
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings.runtime_config import TierConfig
from tests.support.patience import PATIENCE_S, until
from tests.support.s3_server import options_for
from tests.unit.backends.s3._s3 import BLOCK_BYTES, CONTEXT, key_of

if TYPE_CHECKING:
    from kvtier.core.tier_host import TierHost
    from kvtier.core.wire import Message
    from tests.support.s3_server import MotoServer

pytestmark = pytest.mark.slow

KEYS = tuple(key_of(number) for number in range(4))
FIRST, SECOND = (0, 1, 2, 3), (4, 5, 6, 7)


class Bench:
    """A started host over eight slots."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.memory = SlotMemory.anonymous(8, BLOCK_BYTES)
        self._messages: deque[Message] = deque()
        tier = TierConfig.from_mapping(1, options)
        self.host: TierHost = make_host(tier, CONTEXT, self.memory, self, messages_max=64)
        self.host.start()

    def post(self, message: Message) -> bool:
        """Stand where the link's inbox is."""
        self._messages.append(message)
        return True

    def outcomes_of(self, job: wire.StoreJob | wire.LoadJob) -> tuple[Outcome, ...]:
        assert self.host.post(job)
        ended: list[wire.JobEnded] = []

        def came() -> bool:
            self.host.poll()
            self.host.wake()
            while self._messages:
                message = self._messages.popleft()
                if isinstance(message, wire.JobEnded) and message.job == job.job:
                    ended.append(message)
            return bool(ended)

        until(came, lambda: f"job {job.job} has not ended")
        return ended[0].outcomes


@pytest.mark.parametrize("cell", [None, "thread"])
def test_blocks_go_there_and_come_back_and_it_ends_in_time(
    moto: MotoServer, cell: str | None
) -> None:
    own = options_for(moto.endpoint, f"in-a-{cell}")
    bench = Bench({"type": "s3", **own, **({"isolation": cell} if cell else {})})
    try:
        assert isinstance(bench.host, TierProcess) is (cell is None)
        data = [os.urandom(BLOCK_BYTES) for _ in KEYS]
        for slot, block in zip(FIRST, data, strict=True):
            bench.memory.view(slot)[:] = block
        stored = bench.outcomes_of(wire.StoreJob(job=1, request="r", keys=KEYS, slots=FIRST))
        assert stored == (Outcome.DONE,) * 4
        loaded = bench.outcomes_of(wire.LoadJob(job=2, request="r", keys=KEYS, slots=SECOND))
        assert loaded == (Outcome.DONE,) * 4
        assert [bytes(bench.memory.view(slot)) for slot in SECOND] == data
        moto.kill()
        failed = bench.outcomes_of(wire.LoadJob(job=3, request="r", keys=KEYS, slots=SECOND))
        assert failed == (Outcome.FAILED,) * 4
        assert bench.host.close(PATIENCE_S)
    finally:
        bench.host.close(PATIENCE_S)
