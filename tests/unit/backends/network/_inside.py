"""What runs in the namespace: a real server, a backend, and a network that breaks between them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import pytest

from kvtier.plugin_api.backend import Connection, Outcome
from kvtier_backends.mooncake import MooncakeBackend
from kvtier_backends.redis import RedisBackend, servers
from kvtier_backends.s3 import S3Backend
from kvtier_backends.shared import kept_connection
from tests.support import mooncake_server, redis_servers
from tests.support.network_namespace import connected_ports
from tests.support.patience import PATIENCE_S
from tests.support.s3_fault_server import fault_server
from tests.support.s3_server import moto_server, options_for, set_credentials
from tests.unit.backends.network._held import BLOCK_BYTES, CONTEXT, SHORT_S, Held

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.network_namespace import Network

ROUNDS = 3
ROUNDS_MAX = 20
STRANDED_S = 3.0
"""The one call that finds out must have been sent by then."""
KEPT = (1, 2, 3, 4)
CALLS_AT_ONCE = 6
_NOT_SERVED = Counter({Outcome.FAILED: len(KEPT), Outcome.ABSENT: len(KEPT)})

FAULTS: dict[str, Callable[[Network, Served], object]] = {
    "requests dropped": lambda network, served: network.drop_requests(served.port),
    "dropped": lambda network, served: network.drop(served.port),
    "replies dropped": lambda network, served: network.drop_replies(served.port),
    "cut in a reply": lambda network, served: network.cut_replies(served.port, served.cut_bytes),
    "reset": lambda network, served: network.reset(served.port),
}


class Served(NamedTuple):
    """A backend, and the server that it needs."""

    held: Held
    port: int
    set_patience: Callable[[float], None]
    """Set how long connecting may take: short, so that what can't be reached is given up."""
    cut_bytes: int = BLOCK_BYTES * 3 // 2  #: the server's replies to a load have more


async def breaks_and_heals(network: Network, folder: Path, kind: str) -> None:
    """Let each fault come and go: nothing is late or wrong meanwhile, and all is there again."""
    kept_connection.PAUSE_S_MIN, kept_connection.PAUSE_S_MAX = 0.01, 0.05
    with _SERVED[kind](folder) as served:
        held = served.held
        await held.open()
        served.set_patience(PATIENCE_S)
        assert await held.store(*KEPT) == {Outcome.DONE: len(KEPT)}
        for number, (fault, begin) in enumerate(FAULTS.items()):
            assert await held.load(*KEPT) == {Outcome.DONE: len(KEPT)}, fault
            served.set_patience(SHORT_S)
            begin(network, served)
            for rounds in range(ROUNDS_MAX):
                # A call that is late before it is sent notices nothing: others may have to follow.
                if rounds >= ROUNDS and held.states[-1] is Connection.GONE:
                    break
                await asyncio.gather(
                    held.load(*KEPT, within_s=SHORT_S),
                    held.store(100 + number, within_s=SHORT_S),
                    held.probe(*KEPT, within_s=SHORT_S),
                )
            await held.until(Connection.GONE)
            assert await held.load(*KEPT, within_s=SHORT_S) == {Outcome.FAILED: len(KEPT)}, fault
            network.heal()
            served.set_patience(PATIENCE_S)
            await held.until(Connection.UP)
            assert await held.load(*KEPT) == {Outcome.DONE: len(KEPT)}, fault
            assert await held.probe(*KEPT) == {True: len(KEPT)}, fault
            assert await held.store(100 + number) == {Outcome.DONE: 1}, fault
        changes = [Connection.GONE, Connection.UP] * len(FAULTS)
        assert held.states == [Connection.CONNECTING, Connection.UP, *changes]
        await held.close()


async def is_stranded(network: Network, folder: Path, kind: str) -> None:
    """Forget all connections that there are, as a firewall does: one call finds out for all."""
    with _SERVED[kind](folder) as served:
        held = served.held
        await held.open()
        served.set_patience(PATIENCE_S)
        assert await held.store(*KEPT) == {Outcome.DONE: len(KEPT)}
        await asyncio.gather(*(held.load(*KEPT) for _ in range(CALLS_AT_ONCE)))
        assert network.strand(served.port) >= CALLS_AT_ONCE
        assert await held.load(*KEPT, within_s=STRANDED_S) == {Outcome.FAILED: len(KEPT)}
        for _ in range(ROUNDS):
            assert await held.load(*KEPT) == {Outcome.DONE: len(KEPT)}
        assert Connection.GONE not in held.states
        network.heal()  # what ended is heard of, so that the server's ends are closed, too
        await held.close()


async def owner_is_reset(network: Network, folder: Path) -> None:
    """Refuse what is sent to the process that has the blocks, while the master can be reached."""
    with _mooncake(folder) as served:
        held = served.held
        await held.open()
        assert await held.store(*KEPT) == {Outcome.DONE: len(KEPT)}
        (port,) = connected_ports() - {served.port}
        network.reset(port)
        for number in range(ROUNDS):
            # A refusal is told apart from silence only by how soon it comes: misses, or given up.
            assert await held.load(*KEPT, within_s=SHORT_S) <= _NOT_SERVED
            assert await held.store(100 + number, within_s=SHORT_S) == {Outcome.FAILED: 1}
        network.heal()
        while await held.load(*KEPT) != {Outcome.DONE: len(KEPT)}:  # it waits before it reconnects
            await asyncio.sleep(0)
        assert held.states == [Connection.CONNECTING, Connection.UP]
        await held.close()


async def packets_fare_as_told(network: Network, _folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def connect(within_s: float = PATIENCE_S) -> socket.socket:
            return socket.create_connection(("127.0.0.1", port), within_s)

        with connect() as before:
            network.reset(port)
            before.sendall(b"?")
            with pytest.raises(ConnectionResetError):
                before.recv(1)
            with pytest.raises(ConnectionRefusedError):
                connect()
        for drop in (network.drop, network.drop_requests, network.drop_replies):
            drop(port)
            with pytest.raises(TimeoutError):
                connect(SHORT_S)
        network.heal()
        with connect() as old, server.accept()[0]:
            assert network.strand(port) == 1
            old.sendall(b"?")
            old.settimeout(SHORT_S)
            with pytest.raises(TimeoutError):
                old.recv(1)
            connect().close()
        network.heal()
        connect().close()


@contextmanager
def _redis(folder: Path) -> Iterator[Served]:
    servers.CHECK_S = 1e6
    patient = {"connect_timeout_s": PATIENCE_S, "call_timeout_s": PATIENCE_S}
    with redis_servers.running("valkey", folder / "server") as server:
        backend = RedisBackend.from_options({"url": server.url, **patient}, CONTEXT)

        def set_patience(seconds: float) -> None:
            object.__setattr__(backend._given, "connect_timeout_s", seconds)

        yield Served(Held(backend), server.port, set_patience)


@contextmanager
def _s3(folder: Path) -> Iterator[Served]:
    del folder
    with moto_server() as server:
        yield _s3_at(server.endpoint)


@contextmanager
def _s3_idle(folder: Path) -> Iterator[Served]:
    """Give a server that keeps idle connections, which moto does not."""
    del folder
    with fault_server() as (_, endpoint):
        yield _s3_at(endpoint)


def _s3_at(endpoint: str) -> Served:
    set_credentials()
    options = options_for(endpoint, "p", request_timeout_s=PATIENCE_S)
    backend = S3Backend.from_options(options, CONTEXT)

    def set_patience(seconds: float) -> None:
        backend._connection._timeout_s = seconds

    idle_max = 2 * len(KEPT)  # of the last load; the server's end may be in this process, too
    return Served(Held(backend, idle_max=idle_max), int(endpoint.rpartition(":")[2]), set_patience)


@contextmanager
def _mooncake(folder: Path) -> Iterator[Served]:
    os.environ.update(
        MC_RPC_TIMEOUT_MS="1000",
        MC_RPC_CONNECT_TIMEOUT_MS="1000",
        MC_TCP_STATUS_TIMEOUT_SEC="1",
        MC_TCP_PROGRESS_TIMEOUT_SEC="1",
    )
    with mooncake_server.running(folder) as cluster:
        backend = MooncakeBackend.from_options({"master": cluster.address}, CONTEXT)
        held = Held(backend, is_cancelled=True)
        yield Served(held, cluster.master.port, lambda _seconds: None, cut_bytes=100)


_SERVED = {"redis": _redis, "s3": _s3, "s3_idle": _s3_idle, "mooncake": _mooncake}
