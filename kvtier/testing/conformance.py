"""The conformance suite: every backend's obligations, as checks that can fail.

For the author of a backend::

    def make(context: BackendContext) -> Backend:
        return MyBackend.from_options({"address": server.address}, context)


    @pytest.mark.anyio
    @pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
    async def test_my_backend_keeps_the_contract(check: BackendCheck) -> None:
        await check(make)

or, all at once, ``await check_backend(make)``. Each check opens and closes
backends of its own, under keys that nothing else uses, so they share storage
and run in any order. They need asyncio, as a tier cell does. See
``MakeBackend`` for the maker's obligations.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import Final

import anyio
import anyio.lowlevel

from kvtier.errors import ConfigError, StoreFault
from kvtier.plugin_api.backend import LoadBlock, Loaded, Outcome, block_digest
from kvtier.plugin_api.keys import MARK_BYTES
from kvtier.plugin_api.metrics import Gauge
from kvtier.plugin_api.threads import BoundedCall
from kvtier.testing import _workbench
from kvtier.testing._workbench import BackendCheck as BackendCheck
from kvtier.testing._workbench import Bench, context, expect, new_block, new_blocks, opened
from kvtier.testing._workbench import MakeBackend as MakeBackend
from kvtier.testing._workbench import NotConforming as NotConforming
from kvtier.testing.backend_books import (
    storage_that_outlives_it_has_a_place,
    what_is_left_after_a_restart_is_listed,
    what_is_lost_is_told,
)
from kvtier.testing.backend_calls import (
    a_cancelled_call_ends,
    busy_threads_counts_who_may_touch_a_buffer,
    no_call_blocks_the_event_loop,
)


async def check_backend(make: MakeBackend, *, persistent: bool = False) -> None:
    """Run every check; ``persistent`` adds that blocks outlive the backend.

    Raises ``NotConforming`` at the first broken promise, with the check's name; an exception
    that a backend may not raise is passed on unchanged.
    """
    for check in (*BACKEND_CHECKS, *(PERSISTENCE_CHECKS if persistent else ())):
        try:
            await check(make)
        except NotConforming as broken:
            raise NotConforming(f"{check.__name__}: {broken}") from broken


async def blocks_come_back_byte_exact(make: MakeBackend) -> None:
    """Many blocks stored in one call are loaded whole, each with its digest."""
    async with opened(make) as bench:
        blocks = new_blocks(32)
        await bench.keep(blocks)
        await bench.expect_kept(blocks)
        await bench.expect_kept(blocks[::-3])


async def a_load_of_a_missing_key_is_absent(make: MakeBackend) -> None:
    """A miss is a value, alone and between hits, and does not shift other results."""
    async with opened(make) as bench:
        blocks = new_blocks(9)
        await bench.expect_absent(blocks)
        await bench.keep(blocks[::2])
        for index, answer in enumerate(await bench.load(blocks)):
            if index % 2 == 0:
                bench.expect_block(blocks[index], answer, index)
            else:
                expect(answer.outcome is Outcome.ABSENT, "a miss between hits must be ABSENT")


async def it_may_be_made_in_any_thread(make: MakeBackend) -> None:
    """It is made in a thread of its own, so that a start over storage that hangs can end."""
    made = BoundedCall(lambda: make(context()), "conformance-make")
    expect(made.wait(_workbench.CHECK_TIMEOUT_S_MAX), "a backend must be made at some time")
    backend = made.result()
    async with opened(lambda _: backend) as bench:
        blocks = new_blocks(4)
        await bench.keep(blocks)
        await bench.expect_kept(blocks)


async def a_probe_tells_what_is_there(make: MakeBackend) -> None:
    """Probe returns results in order; a key never stored is not there."""
    async with opened(make) as bench:
        blocks = new_blocks(9)
        await bench.keep(blocks[::2])
        found = await bench.backend.probe([block.key for block in blocks])
        wanted = [index % 2 == 0 for index in range(len(blocks))]
        expect(
            [bool(one) for one in found] == wanted, f"probe must return {wanted}, returned {found}"
        )


async def storing_twice_is_done(make: MakeBackend) -> None:
    """A key that exists is DONE, and its bytes and digest stay those of one store."""
    async with opened(make) as bench:
        first = new_block()
        await bench.keep([first])
        await bench.keep([first])
        await bench.expect_kept([first])
        second = new_block(key=first.key)
        await bench.keep([second])
        (answer,) = await bench.load([second])
        held = bytes(bench.slots.view(0))
        pairs = {(first.data, first.digest), (second.data, second.digest)}
        expect((held, answer.digest) in pairs, "bytes and digest of a key must be of one store")


async def a_removed_key_is_absent(make: MakeBackend) -> None:
    """Remove forgets the named keys and no others; unknown keys are not an error."""
    async with opened(make) as bench:
        blocks = new_blocks(6)
        await bench.keep(blocks)
        gone, kept = blocks[:3], blocks[3:]
        await bench.backend.remove([block.key for block in [*gone, new_block()]])
        await bench.backend.remove([block.key for block in gone])
        await bench.expect_absent(gone)
        await bench.expect_kept(kept)
        found = await bench.backend.probe([block.key for block in gone])
        expect(not any(found), "a removed key must not be found by probe")
        await bench.keep(gone)
        await bench.expect_kept(gone)


async def the_digest_is_kept_not_made_up(make: MakeBackend) -> None:
    """A digest that does not fit the bytes comes back as it was, or not as DONE.

    A backend that computes the digest from the bytes it read would hide all damage.
    """
    async with opened(make) as bench:
        blocks = [new_block()._replace(digest=digest) for digest in (bytes(16), os.urandom(16))]
        await bench.store(blocks)
        for block, answer in zip(blocks, await bench.load(blocks), strict=True):
            honest = answer.outcome is not Outcome.DONE or answer.digest == block.digest
            expect(honest, f"the digest must be the one stored, got {answer}")


async def calls_may_overlap(make: MakeBackend) -> None:
    """As many stores and loads as ``traits`` allow run at once, and do not mix."""
    async with opened(make) as bench:
        traits = bench.backend.traits
        expect(traits.load_batches_max >= 1, "traits.load_batches_max must be at least 1")
        expect(traits.store_batches_max >= 1, "traits.store_batches_max must be at least 1")
        for kind in ("load", "store"):
            least, most = f"{kind}_batch_blocks_min", f"{kind}_batch_blocks_max"
            expect(
                1 <= getattr(traits, least) <= getattr(traits, most),
                f"traits.{least} must be at least 1, and at most traits.{most}",
            )
        blocks = new_blocks(32)
        stores = min(len(blocks), traits.store_batches_max)
        loads = min(len(blocks), traits.load_batches_max)
        outcomes: list[Outcome] = []

        async def store_some(first: int) -> None:
            for index in range(first, len(blocks), stores):
                outcomes.extend(await bench.store([blocks[index]], slot=index))

        async def load_some(first: int) -> None:
            for index in range(first, len(blocks), loads):
                await bench.expect_kept([blocks[index]], slot=index)

        async with anyio.create_task_group() as group:
            for first in range(stores):
                group.start_soon(store_some, first)
        done = all(outcome is Outcome.DONE for outcome in outcomes)
        expect(done, f"stores that overlap must be DONE, got {outcomes}")
        async with anyio.create_task_group() as group:
            for first in range(loads):
                group.start_soon(load_some, first)


async def calls_may_meet_on_one_key(make: MakeBackend) -> None:
    """Stores, loads and removes of one key at once: a DONE load is whole, or its digest differs.

    Shared storage may give a removed block's room to another block while it is being read. The
    tier compares the digest with the bytes, so that such a load is a miss.
    """
    async with opened(make) as bench:
        block = new_block()

        async def store(slot: int) -> None:
            outcomes = await bench.store([block], slot=slot)
            expect(Outcome.FULL not in outcomes, "a store with room must not be FULL")

        async def load(slot: int) -> None:
            (answer,) = await bench.load([block], slot=slot)
            digest_of_bytes = block_digest(block.key, bench.slots.view(slot))
            if answer.outcome is Outcome.DONE and answer.digest in {None, digest_of_bytes}:
                bench.expect_block(block, answer, slot)

        async def remove() -> None:
            with suppress(StoreFault):  # It may be there still, since a store is under way.
                await bench.backend.remove([block.key])

        async with anyio.create_task_group() as group:
            for slot in range(0, 12, 2):
                group.start_soon(store, slot)
                group.start_soon(load, slot + 1)
            group.start_soon(remove)
        await bench.keep([block])
        await bench.expect_kept([block])


async def any_number_of_blocks_is_a_batch(make: MakeBackend) -> None:
    """Calls with no block, with one, and with one key twice are calls like any other."""
    async with opened(make) as bench:
        backend = bench.backend
        await bench.keep([])
        await bench.expect_kept([])
        expect(list(await backend.probe([])) == [], "a probe of no keys must return no answers")
        await backend.remove([])
        block = new_block()
        await bench.keep([block])
        await bench.expect_kept([block])
        twice = new_block()
        await bench.keep([twice, twice])
        await bench.expect_kept([twice, block, twice])


async def keys_are_distinguished_byte_by_byte(make: MakeBackend) -> None:
    """Hashes of several lengths, groups, shared beginnings and shared ends do not mix."""
    async with opened(make) as bench:
        stem = os.urandom(16)
        hashes = [stem, stem + bytes(16), stem * 2, stem * 4, stem[::-1], b"/\0.\n" * 4]
        hashes.append(stem * 4 + bytes(MARK_BYTES))  # with the mark of a generation of weights
        groups = [number.to_bytes(4, "big") for number in (0, 1, 256, 2**32 - 1)]
        blocks = [new_block(key=name + group) for name in hashes for group in groups]
        await bench.backend.remove([block.key for block in blocks])  # the last has fixed keys
        for block in blocks:
            await bench.keep([block])
        await bench.expect_kept(blocks)
        await bench.backend.remove([blocks[0].key])
        await bench.expect_absent(blocks[:1])
        await bench.expect_kept(blocks[1:])
        await bench.backend.remove([block.key for block in blocks])


async def a_load_stays_in_its_buffer(make: MakeBackend) -> None:
    """Hits and misses alike leave the neighbouring slots unchanged."""
    async with opened(make) as bench:
        blocks = new_blocks(8)
        await bench.keep(blocks[::2])
        guard = os.urandom(len(bench.slots.view(0)))
        for slot in range(2 * len(blocks) + 1):
            bench.slots.view(slot)[:] = guard
        views = map(bench.slots.view, range(1, 2 * len(blocks), 2))
        loads = [LoadBlock(block.key, view) for block, view in zip(blocks, views, strict=True)]
        await bench.backend.load(loads)
        for slot in range(0, 2 * len(blocks) + 1, 2):
            expect(bench.slots.view(slot) == guard, "a load wrote outside its buffer")


async def a_full_store_says_so(make: MakeBackend) -> None:
    """A bounded backend is FULL at its bound, keeps its blocks, and takes more after remove."""
    async with opened(make) as bench:
        capacity = bench.backend.traits.capacity_blocks
        if capacity is None:
            return
        lower, upper = _workbench.BLOCKS_MIN, _workbench.BLOCKS_MAX
        expect(lower <= capacity <= upper, f"make it with room for {lower} to {upper} blocks")
        kept = new_blocks(capacity)
        for block in kept:
            await bench.keep([block])
        extra = new_blocks(2)
        outcomes = await bench.store(extra)
        expect(outcomes == [Outcome.FULL] * 2, f"beyond the capacity is FULL, got {outcomes}")
        await bench.expect_absent(extra)
        await bench.keep(kept[:3])
        await bench.backend.remove([kept.pop().key, kept.pop().key])
        await bench.keep(extra)
        await bench.expect_kept([*kept[:30], *extra])


async def a_cancelled_call_harms_no_other(make: MakeBackend) -> None:
    """After stores and loads were cancelled, the backend still does its work.

    The slots of a cancelled call are not touched again: it may still use them.
    """
    async with opened(make) as bench:
        blocks = new_blocks(8)
        await bench.keep(blocks)
        doomed = new_blocks(8)

        async def load(slot: int) -> None:
            await bench.load(blocks[slot % 8 :], slot=slot)

        for slot in (16, 24):
            async with anyio.create_task_group() as group:
                group.start_soon(bench.store, doomed)
                group.start_soon(load, slot)
                await anyio.lowlevel.checkpoint()
                group.cancel_scope.cancel()
        others = new_blocks(8)
        outcomes = [await bench.store([block], slot=32 + at) for at, block in enumerate(others)]
        expect(outcomes == [[Outcome.DONE]] * 8, f"stores after a cancelled one: got {outcomes}")
        await bench.expect_kept([*others, *blocks], slot=40)


async def reopening_serves_nothing_wrong(make: MakeBackend) -> None:
    """After close and open, each block is whole or absent; closing twice is not an error."""
    await _reopen(make, kept_wanted=False)


async def blocks_outlive_the_backend(make: MakeBackend) -> None:
    """After close and open, each block is there. For storage that persists."""
    await _reopen(make, kept_wanted=True)


async def all_that_takes_room_is_listed(make: MakeBackend) -> None:
    """A full backend lists its blocks once it is open again; with those removed, it is empty.

    Unlisted blocks can never be evicted. Stores and removals continue meanwhile.
    """
    async with opened(make) as bench:
        capacity = bench.backend.traits.capacity_blocks
        if capacity is None:
            return
        stored = new_blocks(capacity)
        for start in range(0, capacity, 16):
            await bench.keep(stored[start : start + 16])
    async with opened(make, again=True) as bench:
        listed = {key for keys in bench.backend.contents() for key in keys}
        expect(listed >= {block.key for block in stored}, "contents must name each stored block")
    async with opened(make, again=True) as bench:
        listed = set()
        for keys in bench.backend.contents():
            await bench.backend.remove(keys[:1])
            (extra,) = new_blocks(1)
            await bench.store([extra])
            listed |= {*keys, extra.key}
        await bench.backend.remove(sorted(listed))
        for start in range(0, capacity, 16):
            await bench.keep(new_blocks(min(16, capacity - start)))


async def what_is_read_only_is_served(make: MakeBackend) -> None:
    """A backend that may write nothing serves blocks stored by another one, or is refused."""
    blocks = new_blocks(4)
    async with opened(make) as bench:
        await bench.keep(blocks)
        await bench.backend.close()
    with suppress(ConfigError):
        async with opened(make, replace(context(), read_only=True), again=True) as bench:
            found = await bench.backend.probe([block.key for block in blocks])
            expect(all(found), "a backend that is read only must find the stored blocks")
            await bench.expect_kept(blocks)


async def namespaces_do_not_mix(make: MakeBackend) -> None:
    """Another model's backend on the same storage neither finds nor removes these blocks."""
    async with opened(make) as bench, opened(make, context(model="another/model")) as other:
        blocks = new_blocks(4)
        await bench.keep(blocks)
        await other.expect_absent(blocks)
        found = await other.backend.probe([block.key for block in blocks])
        expect(not any(found), "a probe must not see another namespace's blocks")
        await other.keep([new_block(key=block.key) for block in blocks])
        await other.backend.remove([block.key for block in blocks])
        await bench.expect_kept(blocks)


async def odd_block_sizes_work_or_are_refused(make: MakeBackend) -> None:
    """Blocks that are not a whole number of pages come back too, unless refused at start."""
    for size in (4096 + 512, 5001, 100):
        try:
            async with opened(make, context(size)) as bench:
                blocks = new_blocks(4, size)
                await bench.keep(blocks)
                await bench.expect_kept(blocks)
                await bench.expect_absent(new_blocks(1, size))
        except ConfigError:
            continue


async def counters_are_counts(make: MakeBackend) -> None:
    """``counters`` maps names in ``metrics`` to whole numbers, which only grow but for gauges."""
    async with opened(make) as bench:
        blocks = new_blocks(2)
        await bench.keep(blocks)
        counts = bench.backend.counters()
        sound = all(type(name) is str and type(count) is int for name, count in counts.items())
        expect(sound, f"counters must map str to int, got {counts}")
        metrics = bench.backend.metrics
        unknown = sorted(counts.keys() - metrics.keys())
        expect(not unknown, f"counters that are not declared in metrics: {unknown}")
        await bench.backend.remove([block.key for block in blocks])
        await bench.keep(new_blocks(1))
        later = bench.backend.counters()
        fell = {
            name: (count, later.get(name))
            for name, count in counts.items()
            if not isinstance(metrics[name], Gauge) and later.get(name, -1) < count
        }
        expect(not fell, f"counters fell that are not gauges in metrics: {fell}")


async def _reopen(make: MakeBackend, *, kept_wanted: bool) -> None:
    blocks = new_blocks(8)
    async with opened(make) as bench:
        await bench.keep(blocks)
        await bench.backend.close()
    async with opened(make, again=True) as bench:
        found = await bench.backend.probe([block.key for block in blocks])
        answers = await bench.load(blocks)
        for index, (there, answer) in enumerate(zip(found, answers, strict=True)):
            _expect_whole_or_absent(bench, blocks[index], answer, index, there=there)
            gone = not there or answer.outcome is not Outcome.DONE
            expect(not (kept_wanted and gone), f"a stored block was lost: {answer}")
        await bench.keep(blocks)
        await bench.expect_kept(blocks)


def _expect_whole_or_absent(
    bench: Bench, block: _workbench.Block, answer: Loaded, slot: int, *, there: bool
) -> None:
    if answer.outcome is Outcome.DONE:
        bench.expect_block(block, answer, slot)
        expect(there, "probe must find each block that a load finds")
    else:
        expect(answer.outcome is Outcome.ABSENT, f"reopened: whole or absent, got {answer}")


BACKEND_CHECKS: Final[tuple[BackendCheck, ...]] = (
    what_is_left_after_a_restart_is_listed,  # first: so the others empty a bounded backend
    blocks_come_back_byte_exact,
    a_load_of_a_missing_key_is_absent,
    it_may_be_made_in_any_thread,
    a_probe_tells_what_is_there,
    storing_twice_is_done,
    a_removed_key_is_absent,
    the_digest_is_kept_not_made_up,
    calls_may_overlap,
    calls_may_meet_on_one_key,
    any_number_of_blocks_is_a_batch,
    keys_are_distinguished_byte_by_byte,
    a_load_stays_in_its_buffer,
    a_full_store_says_so,
    a_cancelled_call_harms_no_other,
    reopening_serves_nothing_wrong,
    namespaces_do_not_mix,
    odd_block_sizes_work_or_are_refused,
    counters_are_counts,
    a_cancelled_call_ends,
    busy_threads_counts_who_may_touch_a_buffer,
    no_call_blocks_the_event_loop,
    storage_that_outlives_it_has_a_place,
    what_is_lost_is_told,
)
"""The checks that every backend must pass."""

PERSISTENCE_CHECKS: Final[tuple[BackendCheck, ...]] = (
    blocks_outlive_the_backend,
    all_that_takes_room_is_listed,
    what_is_read_only_is_served,
)
"""Further checks for a backend whose blocks are to outlive the engine."""
