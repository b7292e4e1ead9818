"""What a backend of remote storage is given in its cell: memory, deadlines, ears for its server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier.core import wire
from kvtier.plugin_api.backend import Connection, Outcome
from kvtier.plugin_api.deadlines import NEVER, time_left_s
from tests.support.patience import PATIENCE_S
from tests.unit.hosts._link_end import BLOCK
from tests.unit.hosts.test_thread_host import Bench, DictBackend

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.plugin_api.backend import LoadBlock, Loaded, StoreBlock

FAR_S = 1e12  # of any clock


class Remote(DictBackend):
    """Notes what it is given, and is asked for what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.registered: list[memoryview] = []
        self.time_left: list[float] = []

    async def open(self) -> None:
        assert not self.registered
        self.on_connection(Connection.CONNECTING)

    async def register_memory(self, slots: memoryview) -> None:
        self.registered.append(slots)
        self.on_connection(Connection.UP)

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self.time_left.append(time_left_s())
        return await super().probe(keys)

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        self.time_left.append(time_left_s())
        return await super().load(blocks)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        self.time_left.append(time_left_s())
        return await super().store(blocks)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(Remote())
    yield bench
    bench.cell.close(PATIENCE_S)


def remote_of(bench: Bench) -> Remote:
    backend = bench.cell._backend
    assert isinstance(backend, Remote)
    return backend


def hear_of_the_connection(bench: Bench) -> None:
    for state in (Connection.CONNECTING, Connection.UP):
        assert bench.link.next() == wire.ConnectionChanged(state)


def test_the_link_hears_of_the_connection_and_all_slots_are_registered_once(bench: Bench) -> None:
    hear_of_the_connection(bench)
    bench.fill(7, 7)
    (slots,) = remote_of(bench).registered
    assert slots.nbytes == 8 * BLOCK
    assert bytes(slots[7 * BLOCK :]) == b"\x07" * BLOCK, "the slots themselves"
    assert not slots.readonly


def test_each_call_is_told_how_long_anybody_waits_for_it(bench: Bench) -> None:
    """One whose time is over is called all the same: it has to release its slots."""
    hear_of_the_connection(bench)
    bench.post(wire.Probe(1, (b"a",), deadline=FAR_S))
    bench.link.next()
    bench.post(wire.StoreJob(2, "r", (b"a",), (0,), deadline=0.0))
    bench.link.next()
    bench.post(wire.LoadJob(3, (b"a",), (1,)))
    bench.link.next()
    probe_s, store_s, load_s = remote_of(bench).time_left
    assert 0 < probe_s <= FAR_S
    assert (store_s, load_s) == (0.0, NEVER)
