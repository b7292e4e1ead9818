"""Stores, removes and loads until it is killed; says what was acknowledged. Run with ``-m``."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque

from kvtier.backend import Outcome
from tests.unit.backends.disk._disk import key_of, open_disk

NUMBERS_PER_CALL = 6


async def store_for_ever(path: str, first: int) -> None:
    """Keep the newest blocks, as many as fit; each line is a block that was acknowledged."""
    async with open_disk(path) as disk:
        capacity = disk.backend.traits.capacity_blocks
        assert capacity is not None
        resident = deque(key for keys in disk.backend.contents() for key in keys)
        os.write(1, b"ready\n")
        number = first
        while True:
            numbers = range(number, number + NUMBERS_PER_CALL)
            excess = len(resident) + NUMBERS_PER_CALL - capacity
            await disk.backend.remove([resident.popleft() for _ in range(excess)])
            outcomes = await disk.store(*numbers)
            assert Outcome.FAILED not in outcomes
            done = [n for n, o in zip(numbers, outcomes, strict=True) if o is Outcome.DONE]
            resident.extend(key_of(number) for number in done)
            os.write(1, "".join(f"{n}\n" for n in done).encode())
            number += NUMBERS_PER_CALL


if __name__ == "__main__":
    asyncio.run(store_for_ever(sys.argv[1], int(sys.argv[2])))
