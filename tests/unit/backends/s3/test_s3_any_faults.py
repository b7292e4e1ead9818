"""Whatever a server does, and in any order: an answer a block, in time, and never a wrong one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Connection, LoadBlock, Loaded, Outcome, block_digest
from kvtier.plugin_api.deadlines import time_limit
from tests.support.examples import SEED, examples
from tests.support.patience import PATIENCE_S
from tests.support.s3_fault_server import Fault
from tests.unit.backends.s3._s3 import S3, data_of, key_of, open_s3

if TYPE_CHECKING:
    from tests.support.s3_fault_server import FaultServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

BLOCKS = 12
BATCH = 4
ROUNDS = examples(100)


def is_served(loaded: Loaded, block: LoadBlock) -> bool:
    """Judge as the layer above does, which compares the bytes with their digest."""
    if loaded.outcome is not Outcome.DONE:
        return False
    return loaded.digest == block_digest(block.key, block.buffer)


async def load(s3: S3, numbers: list[int]) -> list[int]:
    """Load, and return the blocks that would be served, each of which must be right."""
    blocks = [LoadBlock(key_of(number), s3.view()) for number in numbers]
    answers = await s3.backend.load(blocks)
    served = []
    for number, block, loaded in zip(numbers, blocks, answers, strict=True):
        if is_served(loaded, block):
            assert block.buffer == data_of(number)
            served.append(number)
    return served


async def test_no_block_is_wrong_and_all_are_served_again_once_the_faults_are_over(
    faulty: tuple[FaultServer, str],
) -> None:
    server, endpoint = faulty
    draw = random.Random(8841 + SEED)
    async with open_s3(endpoint, request_timeout_s=0.2) as s3:
        for _ in range(ROUNDS):
            for _ in range(draw.randint(0, 2)):
                methods = draw.choice(["GET", "PUT", "HEAD", "POST", "", "ALL"])
                server.misbehave(draw.choice(list(Fault)), methods, times=draw.randint(1, 4))
            numbers = draw.sample(range(BLOCKS), BATCH)
            with time_limit(0.2):
                assert len(await s3.store(*numbers)) == BATCH
                await load(s3, numbers)
                try:
                    assert len(await s3.probe(*numbers)) == BATCH
                    await s3.backend.remove([key_of(numbers[0])])
                except StoreFault:
                    pass
            server.behave()
        s3.set_timeout(PATIENCE_S)
        await s3.until_state(Connection.UP)
        numbers = list(range(BLOCKS))
        assert await s3.store(*numbers) == [Outcome.DONE] * BLOCKS
        assert await load(s3, numbers) == numbers
        assert s3.backend.busy_threads() == 0
