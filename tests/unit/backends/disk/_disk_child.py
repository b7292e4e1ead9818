"""Stores, removes and loads until it is killed; says what was acknowledged."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import TYPE_CHECKING

from kvtier.plugin_api.backend import Outcome
from tests.unit.backends.disk._disk import key_of, open_disk

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from kvtier.plugin_api.backend import BackendContext

NUMBERS_PER_CALL = 8


def run(
    path: str, context: BackendContext, capacity_bytes: int, first: int, said: Connection
) -> None:
    """Store until killed; the first line says that it begins, each other names a block."""
    asyncio.run(store_for_ever(path, context, capacity_bytes, first, said.fileno()))


async def store_for_ever(
    path: str, context: BackendContext, capacity_bytes: int, first: int, said: int
) -> None:
    """Keep the newest blocks, as many as fit; each line is a block that was acknowledged."""
    async with open_disk(path, context, capacity_bytes=capacity_bytes) as disk:
        capacity = disk.capacity
        resident = deque(disk.contents())
        os.write(said, b"ready\n")
        number = first
        while True:
            numbers = range(number, number + NUMBERS_PER_CALL)
            excess = len(resident) + NUMBERS_PER_CALL - capacity
            await disk.backend.remove([resident.popleft() for _ in range(excess)])
            outcomes = await disk.store(*numbers)
            assert Outcome.FAILED not in outcomes
            done = [n for n, o in zip(numbers, outcomes, strict=True) if o is Outcome.DONE]
            resident.extend(key_of(number) for number in done)
            os.write(said, "".join(f"{n}\n" for n in done).encode())
            number += NUMBERS_PER_CALL
