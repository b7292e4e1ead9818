"""Replies are read to where they belong over a real socket, in few turns of the event loop."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_backends.redis import resp
from kvtier_backends.redis.resp import Command, ReplyKind, RespConnection
from tests.support.examples import examples

GUARD = b"\xa5" * 16
TRAILER = b"trailer"


class CountingConnection(RespConnection):
    """Counts the turns of asyncio's."""

    turns = 0

    def buffer_updated(self, nbytes: int) -> None:
        self.turns += 1
        super().buffer_updated(nbytes)


async def exchange(sizes: list[int], sent_bytes: int, wrong: set[int]) -> CountingConnection:
    """Let a server send blocks, some of a wrong length, in parts. Check what arrives where."""
    far_end, near_end = socket.socketpair()
    with far_end:
        far_end.setblocking(False)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: CountingConnection(lambda _lost: None), sock=near_end
        )
        memory = [bytearray(GUARD + bytes(size) + GUARD) for size in sizes]
        slots = [memoryview(each)[16 : 16 + size] for each, size in zip(memory, sizes, strict=True)]
        commands = [Command((b"GET",), slot, len(TRAILER)) for slot in slots]
        blocks = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
        values = [
            block + TRAILER + b"more" * (number in wrong) for number, block in enumerate(blocks)
        ]
        replies = b"".join(b"$%d\r\n%s\r\n" % (len(value), value) for value in values)
        running = asyncio.create_task(connection.run(commands))
        await loop.sock_recv(far_end, 1000)
        for start in range(0, len(replies), sent_bytes):
            await loop.sock_sendall(far_end, replies[start : start + sent_bytes])
            await asyncio.sleep(0)
        await running
        connection.abort()
    for number, (command, slot, block) in enumerate(zip(commands, slots, blocks, strict=True)):
        assert command.reply is not None
        if number in wrong:
            assert command.reply.kind is ReplyKind.OTHER_LENGTH
        else:
            assert (command.reply.kind, command.reply.trailer) == (ReplyKind.BLOCK, TRAILER)
            assert slot == block
    assert all(each.startswith(GUARD) and each.endswith(GUARD) for each in memory)
    return connection


@given(
    st.lists(st.sampled_from([1, 70, 4090, 30_000, 200_000]), min_size=1, max_size=8),
    st.integers(500, 100_000),
    st.sets(st.integers(0, 7)),
    st.sampled_from([0, 50_000, resp.READ_ON_BYTES_MAX]),
)
@settings(max_examples=examples(60))
def test_replies_go_where_they_belong_however_much_of_them_is_there(
    sizes: list[int], sent_bytes: int, wrong: set[int], at_a_stretch: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resp, "READ_ON_BYTES_MAX", at_a_stretch)
        asyncio.run(exchange(sizes, sent_bytes, wrong))


def test_what_is_there_takes_one_turn_of_the_event_loop() -> None:
    connection = asyncio.run(exchange([30_000] * 4, 1_000_000, set()))
    assert connection.turns == 1
