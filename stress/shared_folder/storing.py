"""Stores blocks into a bounded folder until it is killed: ``ROOT CAPACITY SEED BLOCKS``."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import random
import signal
import sys
from typing import Final

from kvtier.plugin_api.backend import (
    BackendContext,
    LoadBlock,
    Namespace,
    Outcome,
    StoreBlock,
    block_digest,
)
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier_backends.fs import FsBackend

BLOCK_BYTES: Final = 4096
FILE_BYTES: Final = BLOCK_BYTES + 4096
CONTEXT: Final = BackendContext(BLOCK_BYTES, Namespace({"model_name": "stored"}), "1:fs")
_BATCH: Final = 16
_LANES: Final = 4
_PR_SET_PDEATHSIG: Final = 1


def key_of(number: int) -> bytes:
    """Return a block's key as vLLM makes them."""
    return hashlib.sha256(str(number).encode()).digest() + bytes(4)


def content_of(number: int) -> bytes:
    """Return a block's bytes."""
    return number.to_bytes(8, "big") * (BLOCK_BYTES // 8)


async def store_for_ever(root: str, capacity: int, seed: int, blocks: int) -> None:
    """Store some of so many blocks and load them again; print how many were stored."""
    backend = FsBackend.from_options(
        {"root_dir": root, "capacity_bytes": capacity, "direct": False}, CONTEXT
    )
    await backend.open()
    slots = SlotMemory.anonymous(_LANES * _BATCH, BLOCK_BYTES)
    lanes = (
        _store_in_lane(
            backend,
            [slots.view(lane * _BATCH + each) for each in range(_BATCH)],
            random.Random(seed * _LANES + lane),
            blocks,
        )
        for lane in range(_LANES)
    )
    await asyncio.gather(*lanes)


async def _store_in_lane(
    backend: FsBackend, views: list[memoryview], chance: random.Random, blocks: int
) -> None:
    while True:
        numbers = chance.sample(range(blocks), _BATCH)
        batch = []
        for number, view in zip(numbers, views, strict=True):
            view[:] = content_of(number)
            batch.append(StoreBlock(key_of(number), view, block_digest(key_of(number), view)))
        outcomes = await backend.store(batch)
        print(outcomes.count(Outcome.DONE), flush=True)
        loads = [LoadBlock(key_of(n), view) for n, view in zip(numbers, views, strict=True)]
        loaded = await backend.load(loads)
        for number, view, answer in zip(numbers, views, loaded, strict=True):
            if answer.outcome not in (Outcome.DONE, Outcome.ABSENT):
                raise AssertionError(answer)
            if answer.outcome is Outcome.DONE and view != content_of(number):
                raise AssertionError(f"wrong bytes for block {number}")


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    place, *given = sys.argv[1:]
    asyncio.run(store_for_ever(place, *map(int, given)))
