"""A batch arrives whole and in order, however little the socket takes at a time."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_backends.redis.resp import Command, ConnectionLost, RespConnection
from tests.support.examples import examples

if TYPE_CHECKING:
    from collections.abc import Callable

SOCKET_BYTES = 4096  # the kernel doubles it
SIZES = st.lists(st.sampled_from([0, 1, 2, 70, 5000, 16384, 16385, 100_000]), max_size=24)


async def connected(far_end: socket.socket, near_end: socket.socket) -> RespConnection:
    for end in (far_end, near_end):
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    make: Callable[[], RespConnection] = lambda: RespConnection(lambda _lost: None)  # noqa: E731
    _, connection = await asyncio.get_running_loop().create_connection(make, sock=near_end)
    return connection


def commands_of(sizes: list[int]) -> tuple[list[Command], bytes]:
    """Return commands whose parts have these sizes, and what is to arrive."""
    parts = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    shown = [memoryview(part) if number % 2 else part for number, part in enumerate(parts)]
    commands = [Command(tuple(shown[at : at + 3])) for at in range(0, len(parts), 3)]
    return commands, b"".join(parts)


@given(SIZES, st.integers(1, 30_000))
@settings(max_examples=examples(60))
def test_a_batch_arrives_whole_and_in_order_however_little_the_socket_takes(
    sizes: list[int], read_bytes: int
) -> None:
    async def run() -> None:
        far_end, near_end = socket.socketpair()
        with far_end:
            connection = await connected(far_end, near_end)
            commands, expected = commands_of(sizes)
            running = asyncio.create_task(connection.run(commands))
            arrived = bytearray()
            loop = asyncio.get_running_loop()
            while len(arrived) < len(expected):
                arrived += await loop.sock_recv(far_end, read_bytes)
            assert arrived == expected
            await loop.sock_sendall(far_end, b"+OK\r\n" * len(commands))
            await running
            assert connection.is_usable
            connection.abort()

    asyncio.run(run())


@pytest.mark.parametrize("sizes", [[70, 100_000], [70, 100_000, 92] * 8])
def test_of_an_aborted_batch_no_buffer_is_read_any_more(sizes: list[int]) -> None:
    """A slot has other bytes soon, which are no part of this block."""

    async def run() -> None:
        far_end, near_end = socket.socketpair()
        with far_end:
            connection = await connected(far_end, near_end)
            slots = [bytearray(b"a" * size) for size in sizes]
            command = Command(tuple(map(memoryview, slots)))
            running = asyncio.create_task(connection.run([command]))
            await asyncio.sleep(0)
            connection.abort()
            for slot in slots:
                slot[:] = b"b" * len(slot)
            with pytest.raises(ConnectionLost):
                await running
            arrived = b""
            while part := await asyncio.get_running_loop().sock_recv(far_end, 1 << 20):
                arrived += part
            assert arrived
            assert set(arrived) == set(b"a")

    asyncio.run(run())


def test_a_connection_that_the_server_has_closed_is_lost() -> None:
    async def run() -> None:
        far_end, near_end = socket.socketpair()
        connection = await connected(far_end, near_end)
        far_end.close()
        with pytest.raises(ConnectionLost):
            await connection.run([Command((memoryview(bytes(100_000)),))])
        connection.abort()

    asyncio.run(run())
