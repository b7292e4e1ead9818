"""Records of many blocks are made off the loop, and counted while they may touch a slot."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Loaded, Outcome
from kvtier_backends.encryption.keys import parse_keys_untrusted
from kvtier_backends.shared.protected_records import SignedRecords
from kvtier_backends.shared.record_threads import RecordThreads, StoredRecord
from kvtier_backends.shared.records import Records
from tests.support.patience import PATIENCE_S, until
from tests.unit.backends.shared._keys import (
    BLOCK_BYTES,
    CONTEXT,
    OLD,
    block_of,
    data_of,
    encrypted,
    signed,
)

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import StoreBlock
    from kvtier_backends.shared.records import Record

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("records", [Records(CONTEXT), signed(OLD), encrypted(OLD)])
async def test_many_blocks_come_back_as_they_were_stored(records: Records) -> None:
    threads = RecordThreads(records, "1:x")
    blocks = [block_of(number, bytes([number]) * 36) for number in range(9)]
    encoded = await threads.encode_all(blocks)
    stored = [
        StoredRecord(block.key, *record, memoryview(bytearray(BLOCK_BYTES)))
        for block, record in zip(blocks, encoded, strict=True)
    ]
    answers = await threads.decode_all(stored)
    assert answers == [Loaded(Outcome.DONE, block.digest) for block in blocks]
    assert [bytes(each.buffer) for each in stored] == [data_of(number) for number in range(9)]
    stored[3] = stored[3]._replace(payload=stored[4].payload)
    again = await threads.decode_all(stored)
    damaged = [at for at, answer in enumerate(again) if answer.outcome is Outcome.DAMAGED]
    assert damaged == ([] if records.are_cheap else [3])
    assert threads.busy() == 0
    threads.stop()


async def test_after_the_end_nothing_waits_for_ever() -> None:
    threads = RecordThreads(signed(OLD), "1:x")
    threads.stop()
    with pytest.raises(StoreFault, match="closed"):
        await threads.encode_all([block_of(1)])


async def test_a_call_that_was_cancelled_counts_until_its_thread_is_done() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    class Slow(SignedRecords):
        def encode(self, block: StoreBlock) -> Record:
            has_begun.set()
            may_end.wait(PATIENCE_S)
            return super().encode(block)

    threads = RecordThreads(Slow(CONTEXT, parse_keys_untrusted(OLD)), "1:x")
    async with anyio.create_task_group() as group:
        group.start_soon(threads.encode_all, [block_of(1)])
        while not has_begun.is_set():
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert threads.busy() == 1
    may_end.set()
    until(lambda: threads.busy() == 0)
    threads.stop()
