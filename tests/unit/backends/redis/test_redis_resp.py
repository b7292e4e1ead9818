"""One connection: replies go where they belong however they are cut, batches arrive whole."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_backends.redis import resp
from kvtier_backends.redis.resp import (
    SCRATCH_BYTES,
    Command,
    ConnectionLost,
    Reply,
    ReplyKind,
    RespConnection,
    packed,
)
from tests.support.examples import examples
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

pytestmark = pytest.mark.anyio
GUARD = b"\xa5" * 16
SOCKET_BYTES = 4096  # the kernel doubles it
GET = packed(b"GET", b"a")
CUTS = st.lists(st.integers(1, 3 * SCRATCH_BYTES), max_size=20)
STRETCHES = st.sampled_from([0, 50_000, resp.READ_ON_BYTES_MAX])


class Slot:
    """A buffer between two that must stay as they are."""

    def __init__(self, size: int) -> None:
        self.all = bytearray(GUARD + bytes(size) + GUARD)
        self.view = memoryview(self.all)[len(GUARD) : len(GUARD) + size]

    def is_guarded(self) -> bool:
        return self.all.startswith(GUARD) and self.all.endswith(GUARD)


class Connected(RespConnection):
    """Notes that it was lost, and counts the turns of asyncio's."""

    def __init__(self) -> None:
        self.lost: list[RespConnection] = []
        self.turns = 0
        super().__init__(self.lost.append)

    def buffer_updated(self, nbytes: int) -> None:
        self.turns += 1
        super().buffer_updated(nbytes)


class Server:
    """The far end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes, cuts: Sequence[int] = ()) -> None:
        for size in (*cuts, len(data)):
            part, data = data[:size], data[size:]
            await self._loop.sock_sendall(self._end, part)
            await asyncio.sleep(0)

    async def take(self, size: int) -> bytes:
        """Return what has come; nothing at the end, also of one with bytes that were not read."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._loop.sock_recv(self._end, size)
        except ConnectionResetError:
            return b""

    def close(self) -> None:
        self._end.close()


@asynccontextmanager
async def connected(socket_bytes: int = 0) -> AsyncIterator[tuple[Connected, Server]]:
    """Connect over a real socket, one that takes and gives little at a time if told so."""
    far_end, near_end = socket.socketpair()
    for end in (far_end, near_end):
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF) if socket_bytes else ():
            end.setsockopt(socket.SOL_SOCKET, option, socket_bytes)
    _, connection = await asyncio.get_running_loop().create_connection(Connected, sock=near_end)
    with far_end:
        try:
            yield connection, Server(far_end)
        finally:
            connection.abort()
            await asyncio.sleep(0)  # what was aborted is closed


async def exchange(
    commands: list[Command], replies: bytes, cuts: Sequence[int], at_a_stretch: int
) -> Connected:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resp, "READ_ON_BYTES_MAX", at_a_stretch)
        async with connected() as (connection, server):
            running = asyncio.create_task(connection.run(commands))
            await server.take(1000)
            await server.send(replies, cuts)
            await running
            assert connection.is_usable
    return connection


def pattern(size: int) -> bytes:
    return bytes(number % 251 for number in range(size))


# --- replies ---


@given(
    CUTS,
    STRETCHES,
    st.integers(1, 3 * SCRATCH_BYTES) | st.sampled_from([70, 4090, 30_000, 200_000]),
    st.integers(0, 200),
    st.integers(0, 200_000),
)
@settings(max_examples=examples(100))
def test_replies_go_where_they_belong_however_they_are_cut(
    cuts: list[int], at_a_stretch: int, size: int, trailer: int, other: int
) -> None:
    slots = [Slot(size) for _ in range(4)]
    commands = [
        Command((packed(b"EXISTS", b"a"),)),
        *(Command((GET,), slot.view, trailer) for slot in slots),
        Command((packed(b"SET", b"a"),)),
        Command((packed(b"SET", b"a"),)),
    ]
    payload = pattern(size)
    record = payload + b"\r\n$"[:1] * trailer
    block = b"$%d\r\n%s\r\n" % (len(record), record)
    replies = b":1\r\n" + block + b"$-1\r\n$%d\r\n%s\r\n" % (other, b"z" * other)
    replies += block + b"+OK\r\n-OOM no\r\n"
    asyncio.run(exchange(commands, replies, cuts, at_a_stretch))
    whole = Reply(ReplyKind.BLOCK, trailer=record[size:], payload_bytes=size)
    replied = [command.reply for command in commands]
    wanted = [Reply(ReplyKind.DONE, "1"), whole, Reply(ReplyKind.MISSING)]
    wanted += [Reply(ReplyKind.OTHER_LENGTH), whole]
    if other == len(record):
        wanted[3] = Reply(ReplyKind.BLOCK, trailer=b"z" * trailer, payload_bytes=size)
    wanted += [Reply(ReplyKind.DONE, "OK"), Reply(ReplyKind.ERROR, "OOM no")]
    assert replied == wanted
    assert slots[0].view == slots[3].view == payload
    assert all(slot.is_guarded() for slot in slots)


@given(CUTS, STRETCHES, st.integers(1, 3 * SCRATCH_BYTES), st.integers(-7, 4 * SCRATCH_BYTES))
@settings(max_examples=examples(100))
def test_a_block_that_may_be_shorter_begins_its_room_and_is_never_longer(
    cuts: list[int], at_a_stretch: int, size: int, length: int
) -> None:
    slot = Slot(size)
    command = Command((GET,), slot.view, 7, lambda bytes_: bytes_ % 3 == 0)
    payload = pattern(max(length, 0))
    record = payload + b"trailer" if length >= 0 else b"trai"
    replies = b"$%d\r\n%s\r\n" % (len(record), record)
    asyncio.run(exchange([command], replies, cuts, at_a_stretch))
    assert slot.is_guarded()
    if not (0 <= length <= size and length % 3 == 0):
        assert command.reply == Reply(ReplyKind.OTHER_LENGTH)
        return
    assert command.reply == Reply(ReplyKind.BLOCK, trailer=b"trailer", payload_bytes=length)
    assert slot.view[:length] == payload


async def test_what_is_there_takes_one_turn_of_the_event_loop() -> None:
    commands = [Command((GET,), Slot(30_000).view, 7) for _ in range(4)]
    replies = b"$30007\r\n%s\r\n" % bytes(30_007) * 4
    assert (await exchange(commands, replies, (), resp.READ_ON_BYTES_MAX)).turns == 1


@given(st.binary(max_size=2 * SCRATCH_BYTES), CUTS)
@settings(max_examples=examples(100))
def test_whatever_comes_stays_in_its_slot_and_is_answered_or_lost(
    data: bytes, cuts: list[int]
) -> None:
    """A server may send anything. Nothing else than ``ConnectionLost`` is raised."""

    async def run() -> None:
        async with connected() as (connection, server):
            slot = Slot(100)
            command = Command((GET,), slot.view, 10)
            running = asyncio.create_task(connection.run([command]))
            await server.take(1000)
            try:
                await server.send(data, cuts)
            except ConnectionError:
                assert not connection.is_usable  # it was no reply
            server.close()
            try:
                await running
            except ConnectionLost:
                assert not connection.is_usable
            else:
                assert command.reply is not None
            assert slot.is_guarded()

    asyncio.run(run())


@pytest.mark.parametrize(
    "data",
    [
        b"?\r\n",
        b"$x\r\n",
        b"+" + b"x" * SCRATCH_BYTES,
        b"+OK\r\n+OK\r\n",  # an answer that a reply without a request for
        b"$20\r\n" + b"x" * 22,  # a block without its end
    ],
)
async def test_what_is_no_reply_ends_the_connection(data: bytes) -> None:
    async with connected() as (connection, server):
        running = asyncio.create_task(connection.run([Command((GET,), Slot(10).view, 10)]))
        await server.take(1000)
        await server.send(data)
        with pytest.raises(ConnectionLost):
            await running
        assert connection.lost == [connection]
        assert not connection.is_usable
        assert await server.take(1) == b""


async def test_after_an_abort_nothing_is_written_to_a_slot() -> None:
    """What the event loop still delivers goes elsewhere."""
    async with connected() as (connection, server):
        slot = Slot(10_000)
        running = asyncio.create_task(connection.run([Command((GET,), slot.view, 10)]))
        await server.take(1000)
        await server.send(b"$10010\r\nsome")
        while not connection.turns:
            await asyncio.sleep(0)
        connection.abort()
        slot.view[:] = b"\xa5" * 10_000
        buffer = connection.get_buffer(-1)
        buffer[:4] = b"more"
        connection.buffer_updated(4)
        assert slot.all == b"\xa5" * len(slot.all)
        with pytest.raises(ConnectionLost):
            await running
        assert await server.take(1) == b""
    assert connection.lost == []  # it was closed here


# --- batches ---


def commands_of(sizes: list[int]) -> tuple[list[Command], bytes]:
    """Return commands whose parts have these sizes, and what is to arrive."""
    parts = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    shown = [memoryview(part) if number % 2 else part for number, part in enumerate(parts)]
    commands = [Command(tuple(shown[at : at + 3])) for at in range(0, len(parts), 3)]
    return commands, b"".join(parts)


def as_over_tls(connection: RespConnection) -> None:
    """Let all go through the transport, which encrypts it there."""
    connection._transport.set_write_buffer_limits(high=1, low=0)
    connection._socket._socket = None


@given(
    st.lists(st.sampled_from([0, 1, 2, 70, 5000, 16384, 16385, 100_000]), max_size=24),
    st.integers(1, 30_000),
    st.booleans(),
)
@settings(max_examples=examples(60))
def test_a_batch_arrives_whole_and_in_order_however_little_the_socket_takes(
    sizes: list[int], read_bytes: int, is_encrypted: bool
) -> None:
    """And no more of it is copied than one part, or what small ones are joined to."""

    async def run() -> None:
        async with connected(SOCKET_BYTES) as (connection, server):
            if is_encrypted:
                as_over_tls(connection)
            commands, expected = commands_of(sizes)
            running = asyncio.create_task(connection.run(commands))
            arrived = bytearray()
            while len(arrived) < len(expected):
                arrived += await server.take(read_bytes)
                waiting = connection._transport.get_write_buffer_size()
                assert waiting <= (100_000 if is_encrypted else 1 << 14)
            assert arrived == expected
            await server.send(b"+OK\r\n" * len(commands))
            await running
            assert connection.is_usable

    asyncio.run(run())


@pytest.mark.parametrize("sizes", [[70, 100_000], [70, 100_000, 92] * 8])
async def test_of_an_aborted_batch_no_buffer_is_read_any_more(sizes: list[int]) -> None:
    """A slot has other bytes soon, which are no part of this block."""
    async with connected(SOCKET_BYTES) as (connection, server):
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
        while part := await server.take(1 << 20):
            arrived += part
        assert set(arrived) == set(b"a")


async def test_a_batch_that_was_cancelled_while_it_was_sent_leaves_no_usable_connection() -> None:
    """A server that answered early still waits for the rest, and would take it from the next."""
    async with connected(SOCKET_BYTES) as (connection, server):
        command = Command((b"head", memoryview(bytes(100_000))))
        running = asyncio.create_task(connection.run([command]))
        await server.take(4)
        await server.send(b"-ERR too long\r\n")
        while command.reply is None:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert not connection.is_usable


async def test_a_connection_that_the_server_has_closed_is_lost() -> None:
    async with connected(SOCKET_BYTES) as (connection, server):
        server.close()
        with pytest.raises(ConnectionLost):
            await connection.run([Command((memoryview(bytes(100_000)),))])
