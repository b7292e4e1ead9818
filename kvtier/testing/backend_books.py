"""Checks a backend's books: it reports the blocks it loses, and lists and names those it keeps.

The tier above evicts only blocks that it tracks.
"""

from __future__ import annotations

import random
from typing import Final

from kvtier.plugin_api.backend import Outcome
from kvtier.testing._workbench import Bench, Block, MakeBackend, expect, new_blocks, opened

BATCH_BLOCKS: Final = 16
ROUNDS: Final = 6
"""How often blocks are removed and others stored: enough that a log begins to reclaim."""


async def storage_that_outlives_it_has_a_place(make: MakeBackend) -> None:
    """If blocks are there after a restart, ``place`` names their place, each time the same.

    Two tiers with one place are refused. Without one, both would write there.
    """
    blocks = new_blocks(4)
    places = []
    async with opened(make) as bench:
        places.append(bench.backend.place)
        await bench.keep(blocks)
    async with opened(make, again=True) as bench:
        places.append(bench.backend.place)
        found = await bench.backend.probe([block.key for block in blocks])
    if any(found):
        first, again = places
        named = isinstance(first, str) and bool(first) and first == again
        expect(
            named,
            "place must name the folder or address of storage that outlives the backend, "
            f"the same one each time it is opened: got {first!r}, then {again!r}",
        )


async def what_is_left_after_a_restart_is_listed(make: MakeBackend) -> None:
    """``contents`` names all blocks there. A block that it omits takes room that is never freed."""
    async with opened(make) as bench:
        capacity = bench.backend.traits.capacity_blocks
        if capacity is None:
            return
        stored = new_blocks(capacity)
        for batch in _batches(stored):
            await bench.keep(batch)
    async with opened(make, again=True) as bench:
        listed = {key for keys in bench.backend.contents() for key in keys}
        there = await _there(bench, stored)
        expect(
            there <= listed,
            f"contents must name each block that is there after a restart: {len(there - listed)} "
            f"of {len(there)} are found, and not named",
        )
        await bench.backend.remove(sorted(listed))
        for batch in _batches(new_blocks(capacity)):
            outcomes = await bench.store(batch)
            expect(
                outcomes == [Outcome.DONE] * len(batch),
                "once all that contents named is removed, all blocks have room again: got "
                f"{outcomes}",
            )


async def what_is_lost_is_told(make: MakeBackend) -> None:
    """A backend with a capacity calls ``on_lost`` for blocks that go for reasons of its own.

    Blocks are stored up to the capacity, removed at random and stored again. A block that
    is gone but not reported makes the tier above promise data that it cannot deliver.
    """
    async with opened(make) as bench:
        capacity = bench.backend.traits.capacity_blocks
        if capacity is None:
            return
        order = random.Random(8841)  # noqa: S311 - the same each time
        here: dict[bytes, Block] = {}
        for _ in range(ROUNDS):
            for batch in _batches(new_blocks(capacity - len(here))):
                outcomes = await bench.store(batch)
                pairs = zip(batch, outcomes, strict=True)
                here.update({b.key: b for b, outcome in pairs if outcome is Outcome.DONE})
            there = await _there(bench, list(here.values()))
            untold = here.keys() - there - bench.lost
            expect(
                not untold,
                f"on_lost must be called for blocks that are gone: {len(untold)} of {len(here)} "
                "were stored, not removed, and are not there",
            )
            expect(not bench.lost_elsewhere, "on_lost must be called on the event loop's thread")
            kept = order.sample(sorted(there), len(there) * 2 // 3)
            await bench.backend.remove(sorted(here.keys() - set(kept)))
            here = {key: here[key] for key in kept}


async def _there(bench: Bench, blocks: list[Block]) -> set[bytes]:
    """Return the keys of the blocks that can be loaded, whole."""
    there = set()
    for batch in _batches(blocks):
        for index, answer in enumerate(await bench.load(batch)):
            if answer.outcome is Outcome.DONE:
                bench.expect_block(batch[index], answer, index)
                there.add(batch[index].key)
    return there


def _batches(blocks: list[Block]) -> list[list[Block]]:
    return [blocks[at : at + BATCH_BLOCKS] for at in range(0, len(blocks), BATCH_BLOCKS)]
