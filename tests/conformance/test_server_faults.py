"""The shipped check of server faults: real tiers pass it, and each flaw is found by it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Loaded, Outcome
from kvtier.testing import NotConforming, ServerFault, check_server_fault
from kvtier_backends.memory import MemoryBackend
from kvtier_backends.redis import RedisBackend, servers
from kvtier_backends.s3 import S3Backend
from kvtier_backends.shared import kept_connection
from tests.support.patience import PATIENCE_S
from tests.support.redis_servers import PROGRAMS, Program, running
from tests.support.s3_server import MotoServer, options_for, set_credentials

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvtier.plugin_api.backend import BackendContext, LoadBlock, StoreBlock

pytestmark = pytest.mark.anyio
BLOCKS = 64


@pytest.fixture(autouse=True)
def _tries_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_connection, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(kept_connection, "PAUSE_S_MAX", 0.05)
    monkeypatch.setattr(servers, "CHECK_S", 1e6)  # what is noticed is noticed by a call, or at once


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fault", ServerFault)
async def test_redis_survives_its_server(
    fault: ServerFault, program: Program, tmp_path: Path
) -> None:
    timeouts = dict.fromkeys(("connect_timeout_s", "call_timeout_s"), PATIENCE_S)
    with running(program, tmp_path / "server") as server:
        options = {"url": server.url, **timeouts}
        await check_server_fault(partial(RedisBackend.from_options, options), server, fault)


class MotoWithBucket(MotoServer):
    """It comes back as whoever runs it would set it up: with the bucket, and without a block."""

    def start(self) -> None:
        super().start()
        self.make_bucket()


@pytest.mark.slow
@pytest.mark.parametrize("fault", [ServerFault.EMPTIED, ServerFault.STOPPED])  # it keeps nothing
async def test_s3_survives_its_server(fault: ServerFault) -> None:
    set_credentials()
    server = MotoWithBucket()
    try:
        server.start()
        options = options_for(server.endpoint, fault.value.replace(" ", "-"))
        await check_server_fault(partial(S3Backend.from_options, options), server, fault)
    finally:
        server.kill()


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
        (AnswersLate, ServerFault.STOPPED, "answers late"),
        (ForgetsThatItForgot, ServerFault.EMPTIED, "must be ABSENT"),
        (ForgetsThatItForgot, ServerFault.KILLED, "brought other bytes"),
    ],
)
async def test_a_flaw_is_named(kind: type[Remote], fault: ServerFault, promise: str) -> None:
    server = NoServer()
    with pytest.raises(NotConforming, match=promise):
        await check_server_fault(partial(made, kind, server), server, fault)
