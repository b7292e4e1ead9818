"""The shipped check of server faults: real tiers pass it, and each flaw is found by it."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Connection, Loaded, Outcome
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.testing import NotConforming, ServerFault, _workbench, check_server_fault
from kvtier_backends.memory import MemoryBackend
from kvtier_backends.mooncake import MooncakeBackend
from kvtier_backends.redis import RedisBackend, servers
from kvtier_backends.s3 import S3Backend
from kvtier_backends.shared import kept_connection
from tests.support import mooncake_server, redis_servers
from tests.support.patience import until_true
from tests.support.s3_server import MotoServer, options_for, set_credentials

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvtier.plugin_api.backend import BackendContext, LoadBlock, StoreBlock
    from kvtier.testing import MakeBackend
    from kvtier.testing.server_faults import FaultyServer
    from tests.support.redis_servers import Program

    Serves = Callable[[Path], AbstractContextManager[tuple[FaultyServer, MakeBackend]]]

pytestmark = pytest.mark.anyio
BLOCKS = 64


@pytest.fixture(autouse=True)
def _tries_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_connection, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(kept_connection, "PAUSE_S_MAX", 0.05)
    monkeypatch.setattr(servers, "CHECK_S", 1e6)  # what is noticed is noticed by a call, or at once
    for name, value in (
        ("MC_RPC_TIMEOUT_MS", "2000"),
        ("MC_RPC_CONNECT_TIMEOUT_MS", "2000"),
        ("MC_TCP_STATUS_TIMEOUT_SEC", "2"),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", "2"),
    ):
        monkeypatch.setenv(name, value)  # Mooncake's library waits so long for what hangs


@contextmanager
def redis(program: Program, folder: Path) -> Iterator[tuple[FaultyServer, MakeBackend]]:
    with redis_servers.running(program, folder / "server") as server:
        yield server, partial(RedisBackend.from_options, {"url": server.url})


class MotoWithBucket(MotoServer):
    """It comes back as whoever runs it would set it up: with the bucket, and without a block."""

    def start(self, *, waits: bool = True) -> None:
        super().start(waits=waits)
        self.make_bucket()


@contextmanager
def s3(_folder: Path) -> Iterator[tuple[FaultyServer, MakeBackend]]:
    set_credentials()
    server = MotoWithBucket()
    try:
        server.start()
        yield server, partial(S3Backend.from_options, options_for(server.endpoint, "p"))
    finally:
        server.kill()


@contextmanager
def mooncake(who: str, folder: Path) -> Iterator[tuple[FaultyServer, MakeBackend]]:
    """Of an owner that is killed the master goes on telling: the tests of the backend have that."""
    with mooncake_server.running(folder) as cluster:
        make = partial(MooncakeBackend.from_options, {"master": cluster.address})
        yield getattr(cluster, who), make


KEEPS_NOTHING = (ServerFault.EMPTIED, ServerFault.STOPPED)
SERVED: dict[str, tuple[Serves, tuple[ServerFault, ...]]] = {
    "valkey": (partial(redis, "valkey"), tuple(ServerFault)),
    "redis": (partial(redis, "redis"), tuple(ServerFault)),
    "s3": (s3, KEEPS_NOTHING),
    "mooncake's master": (partial(mooncake, "master"), KEEPS_NOTHING),
    "mooncake's owner": (partial(mooncake, "owner"), (ServerFault.STOPPED,)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"), [(name, each) for name, (_, faults) in SERVED.items() for each in faults]
)
async def test_a_tier_survives_its_server(name: str, fault: ServerFault, tmp_path: Path) -> None:
    serves, _ = SERVED[name]
    with serves(tmp_path) as (server, make):
        await check_server_fault(make, server, fault)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["valkey", "s3", "mooncake's master"])
async def test_a_server_that_is_not_there_yet_is_used_once_it_is(name: str, tmp_path: Path) -> None:
    """No call waits for it, and the engine need not be restarted."""
    serves, _ = SERVED[name]
    blocks = _workbench.new_blocks(1)
    with serves(tmp_path) as (server, make):
        server.kill()
        backend, states = make(_workbench.context()), list[Connection]()
        backend.on_connection = states.append
        await backend.open()
        try:
            bench = _workbench.Bench(
                backend, SlotMemory.anonymous(1, _workbench.BLOCK_BYTES), set(), set(), states
            )
            await backend.register_memory(bench.slots.buffer)
            assert [each.outcome for each in await bench.load(blocks)] == [Outcome.FAILED]
            assert await bench.store(blocks) == [Outcome.FAILED]
            for call in (backend.probe, backend.remove):
                with pytest.raises(StoreFault):
                    await call([blocks[0].key])
            assert states == [Connection.CONNECTING]
            server.start()
            await until_true(lambda: states[-1] is Connection.UP)
            while await bench.store(blocks) != [Outcome.DONE]:  # until the owner is back, too
                await asyncio.sleep(0)
            await bench.expect_kept(blocks)
        finally:
            await backend.close()


class NoServer:
    """The memory of a backend that plays a server: it answers nothing while it is away."""

    def __init__(self) -> None:
        self.is_away = asyncio.Event()
        self.backends: list[MemoryBackend] = []

    def kill(self) -> None:
        self.is_away.set()
        for backend in self.backends:
            backend._kept.clear()

    def stop(self) -> None:
        self.is_away.set()

    def start(self) -> None:
        self.is_away.clear()

    go_on = start


class Remote(MemoryBackend):
    """Sound: a call while the server is away is a fault."""

    def __init__(self, server: NoServer, context: BackendContext) -> None:
        super().__init__(context, BLOCKS)
        self.server = server
        server.backends.append(self)

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        if self.server.is_away.is_set():
            raise StoreFault("away")
        return await super().load(blocks)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        if self.server.is_away.is_set():
            return [Outcome.FAILED] * len(blocks)
        return await super().store(blocks)


class ServesFromNowhere(Remote):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        if self.server.is_away.is_set():
            return [Loaded(Outcome.DONE, bytes(16))] * len(blocks)
        return await super().load(blocks)


class SaysItHasStored(Remote):
    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        if self.server.is_away.is_set():
            return [Outcome.DONE] * len(blocks)
        return await super().store(blocks)


class AnswersLate(Remote):
    """What the server says once it goes on lands where the block was to go."""

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        if not self.server.is_away.is_set():
            for block in self.__dict__.pop("late", ()):
                block.buffer[:1] = b"!"
        else:
            self.__dict__["late"] = blocks
        return await super().load(blocks)


class ForgetsThatItForgot(Remote):
    """A cache of its own hides that the server has lost a block, with other bytes."""

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        loaded = await super().load(blocks)
        return [
            Loaded(Outcome.DONE, bytes(16)) if each.outcome is Outcome.ABSENT else each
            for each in loaded
        ]


def made(kind: type[Remote], server: NoServer, context: BackendContext) -> Any:
    return kind(server, context)


@pytest.mark.parametrize("fault", ServerFault)
async def test_a_backend_that_keeps_the_contract_passes(fault: ServerFault) -> None:
    server = NoServer()
    await check_server_fault(partial(made, Remote, server), server, fault)


@pytest.mark.parametrize(
    ("kind", "fault", "promise"),
    [
        (ServesFromNowhere, ServerFault.STOPPED, "no load may be DONE"),
        (SaysItHasStored, ServerFault.KILLED, "no store may be DONE"),
        (AnswersLate, ServerFault.STOPPED, "a late response"),
        (ForgetsThatItForgot, ServerFault.EMPTIED, "must be ABSENT"),
        (ForgetsThatItForgot, ServerFault.KILLED, "brought other bytes"),
    ],
)
async def test_a_flaw_is_named(kind: type[Remote], fault: ServerFault, promise: str) -> None:
    server = NoServer()
    with pytest.raises(NotConforming, match=promise):
        await check_server_fault(partial(made, kind, server), server, fault)
