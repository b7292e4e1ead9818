"""Replies are understood however they are cut, and what is no reply ends the connection."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_backends.redis.resp import (
    SCRATCH_BYTES,
    Command,
    ConnectionLost,
    Reply,
    ReplyKind,
    RespConnection,
    packed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

GUARD = b"\xa5" * 16


class Socket(asyncio.Transport):
    """Takes what is written, and is closed when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_aborted = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def abort(self) -> None:
        self.is_aborted = True


class Slot:
    """A buffer between two that must stay as they are."""

    def __init__(self, size: int) -> None:
        self.all = bytearray(GUARD + bytes(size) + GUARD)
        self.view = memoryview(self.all)[len(GUARD) : len(GUARD) + size]

    def is_guarded(self) -> bool:
        return self.all.startswith(GUARD) and self.all.endswith(GUARD)


def feed(connection: RespConnection, data: bytes, cuts: Sequence[int]) -> None:
    """Deliver bytes as a socket does: as many as there is room for, and no more than there are."""
    sizes = [*cuts, len(data)]
    for size in sizes:
        part, data = data[:size], data[size:]
        while part and connection._lost is None:
            buffer = connection.get_buffer(-1)
            taken = min(len(buffer), len(part))
            buffer[:taken] = part[:taken]
            connection.buffer_updated(taken)
            part = part[taken:]


def connected() -> tuple[RespConnection, Socket, list[RespConnection]]:
    lost: list[RespConnection] = []
    connection = RespConnection(lost.append)
    socket = Socket()
    connection.connection_made(socket)
    return connection, socket, lost


async def exchange(commands: list[Command], replies: bytes, cuts: Sequence[int]) -> RespConnection:
    connection, _, _ = connected()
    running = asyncio.create_task(connection.run(commands))
    await asyncio.sleep(0)
    feed(connection, replies, cuts)
    await running
    return connection


CUTS = st.lists(st.integers(1, 3 * SCRATCH_BYTES), max_size=20)


@given(CUTS, st.integers(1, 3 * SCRATCH_BYTES), st.integers(0, 200), st.integers(0, 200_000))
def test_replies_are_understood_however_they_are_cut(
    cuts: list[int], size: int, trailer: int, other: int
) -> None:
    slots = [Slot(size) for _ in range(3)]
    commands = [
        Command((packed(b"EXISTS", b"a"),)),
        *(Command((packed(b"GET", b"b"),), slot.view, trailer) for slot in slots),
        Command((packed(b"SET", b"a"),)),
    ]
    payload = bytes(number % 251 for number in range(size))
    record = payload + b"\r\n$"[:1] * trailer
    replies = b":1\r\n$%d\r\n%s\r\n" % (len(record), record)
    replies += b"$-1\r\n$%d\r\n%s\r\n-OOM no\r\n" % (other, b"z" * other)
    connection = asyncio.run(exchange(commands, replies, cuts))
    assert connection.is_usable
    kinds = [command.reply.kind for command in commands if command.reply]
    last = ReplyKind.BLOCK if other == len(record) else ReplyKind.OTHER_LENGTH
    assert kinds == [ReplyKind.DONE, ReplyKind.BLOCK, ReplyKind.MISSING, last, ReplyKind.ERROR]
    assert commands[0].reply == Reply(ReplyKind.DONE, "1")
    assert commands[1].reply == Reply(ReplyKind.BLOCK, trailer=record[size:], payload_bytes=size)
    assert slots[0].view == payload
    assert commands[4].reply == Reply(ReplyKind.ERROR, "OOM no")
    assert all(slot.is_guarded() for slot in slots)


@given(CUTS, st.integers(1, 3 * SCRATCH_BYTES), st.integers(-200, 3 * SCRATCH_BYTES + 200))
def test_a_block_that_may_be_shorter_begins_its_room_and_is_never_longer(
    cuts: list[int], size: int, length: int
) -> None:
    slot = Slot(size)
    command = Command((packed(b"GET", b"b"),), slot.view, 7, lambda bytes_: bytes_ % 3 == 0)
    payload = bytes(number % 251 for number in range(max(length, 0)))
    record = payload + b"trailer" if length >= 0 else b"trai"
    connection = asyncio.run(exchange([command], b"$%d\r\n%s\r\n" % (len(record), record), cuts))
    assert connection.is_usable
    assert slot.is_guarded()
    reply = command.reply
    assert reply is not None
    if not (0 <= length <= size and length % 3 == 0):
        assert reply.kind is ReplyKind.OTHER_LENGTH
        return
    assert reply == Reply(ReplyKind.BLOCK, trailer=b"trailer", payload_bytes=length)
    assert slot.view[:length] == payload


@given(st.binary(max_size=2 * SCRATCH_BYTES), CUTS)
def test_whatever_comes_stays_in_its_slot_and_is_answered_or_lost(
    data: bytes, cuts: list[int]
) -> None:
    """A server may send anything. Nothing else than ``ConnectionLost`` is raised."""

    async def run() -> None:
        connection, socket, _ = connected()
        slot = Slot(100)
        command = Command((packed(b"GET", b"a"),), slot.view, 10)
        running = asyncio.create_task(connection.run([command]))
        await asyncio.sleep(0)
        feed(connection, data, cuts)
        connection.connection_lost(None)
        try:
            await running
        except ConnectionLost:
            assert command.reply is None or not connection.is_usable
        assert slot.is_guarded()
        assert not connection.is_usable
        assert socket.is_aborted in (True, False)

    asyncio.run(run())


@pytest.mark.parametrize(
    "data",
    [
        b"?\r\n",
        b"$x\r\n",
        b"+" + b"x" * SCRATCH_BYTES,
        b"+OK\r\n+OK\r\n",  # an answer that nobody asked for
        b"$20\r\n" + b"x" * 22,  # a block without its end
    ],
)
def test_what_is_no_reply_ends_the_connection(data: bytes) -> None:
    async def run() -> None:
        connection, socket, lost = connected()
        command = Command((packed(b"GET", b"a"),), Slot(10).view, 10)
        running = asyncio.create_task(connection.run([command]))
        await asyncio.sleep(0)
        feed(connection, data, [])
        with pytest.raises(ConnectionLost):
            await running
        assert socket.is_aborted
        assert lost == [connection]
        assert not connection.is_usable

    asyncio.run(run())


def test_after_an_abort_nothing_is_written_to_a_slot() -> None:
    """What the event loop still delivers goes elsewhere."""

    async def run() -> None:
        connection, socket, lost = connected()
        slot = Slot(10_000)
        running = asyncio.create_task(
            connection.run([Command((packed(b"GET", b"a"),), slot.view, 10)])
        )
        await asyncio.sleep(0)
        feed(connection, b"$10010\r\nsome", [])
        connection.abort()
        slot.view[:] = b"\xa5" * 10_000
        buffer = connection.get_buffer(-1)
        buffer[:4] = b"more"
        connection.buffer_updated(4)
        assert slot.all == b"\xa5" * len(slot.all)
        with pytest.raises(ConnectionLost):
            await running
        assert socket.is_aborted
        connection.connection_lost(None)
        assert lost == []  # it was closed here

    asyncio.run(run())


def test_a_batch_waits_while_the_socket_takes_nothing() -> None:
    """Else all of a batch would be copied."""

    async def run() -> None:
        connection, socket, _ = connected()
        block = memoryview(bytes(100_000))
        commands = [Command((b"head", block, b"tail")) for _ in range(3)]
        connection.pause_writing()
        running = asyncio.create_task(connection.run(commands))
        await asyncio.sleep(0)
        assert bytes(socket.written) == b"head"
        connection.resume_writing()
        await asyncio.sleep(0)
        assert len(socket.written) == 3 * 100_008
        feed(connection, b"+OK\r\n" * 3, [])
        await running

    asyncio.run(run())


def test_a_batch_that_was_cancelled_while_it_was_sent_leaves_no_usable_connection() -> None:
    """A server that answered early still waits for the rest, and would take it from the next."""

    async def run() -> None:
        connection, socket, _ = connected()
        connection.pause_writing()
        running = asyncio.create_task(
            connection.run([Command((b"head", memoryview(bytes(100_000))))])
        )
        await asyncio.sleep(0)
        feed(connection, b"-ERR too long\r\n", [])
        running.cancel()
        await asyncio.wait([running])
        assert bytes(socket.written) == b"head"
        assert not connection.is_usable

    asyncio.run(run())
