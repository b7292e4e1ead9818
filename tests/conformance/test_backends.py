"""Every backend passes the shipped suite, and the suite can tell a bad one."""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from kvtier.plugin_api.backend import (
    Backend,
    BackendContext,
    LoadBlock,
    Loaded,
    Outcome,
    StoreBlock,
    block_digest,
)
from kvtier.testing import (
    BACKEND_CHECKS,
    PERSISTENCE_CHECKS,
    BackendCheck,
    MakeBackend,
    NotConforming,
    _stopped_threads,
    _workbench,
    check_backend,
    conformance,
)
from kvtier_backends.fs import FsBackend
from kvtier_backends.fs.bound import folder_bound
from kvtier_backends.memory import MemoryBackend
from tests.conformance._flawed_conduct import FLAWS
from tests.conformance._shelves import CAPACITY_BYTES, SHELVES, Outlives
from tests.unit.backends.fs.bound._timing import QUICK

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

pytestmark = pytest.mark.anyio


def memory(context: BackendContext) -> Backend:
    return MemoryBackend.from_options({"capacity_bytes": CAPACITY_BYTES}, context)


def fs(root: Path, layout: str, context: BackendContext) -> Backend:
    options = {"root_dir": str(root / "kv"), "layout": layout, "n_read_threads": 4}
    return FsBackend.from_options(options, context)


def bounded_fs(root: Path, context: BackendContext) -> Backend:
    """Room for 256 blocks, whatever their size: with a trailer, and padded."""
    capacity = 256 * (2 * 4096 + context.block_bytes)
    options = {"root_dir": str(root / "kv"), "capacity_bytes": capacity, "n_read_threads": 4}
    return FsBackend.from_options(options, context)


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
async def test_memory_keeps_the_contract(check: BackendCheck) -> None:
    await check(memory)


@pytest.mark.parametrize("layout", ["kvtier", "vllm"])
@pytest.mark.parametrize(
    "check", BACKEND_CHECKS + PERSISTENCE_CHECKS, ids=lambda check: check.__name__
)
async def test_fs_keeps_the_contract(check: BackendCheck, layout: str, tmp_path: Path) -> None:
    await check(partial(fs, tmp_path, layout))


@pytest.mark.parametrize(
    "check", BACKEND_CHECKS + PERSISTENCE_CHECKS, ids=lambda check: check.__name__
)
async def test_fs_with_a_capacity_keeps_the_contract(
    check: BackendCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_bound, "Timing", lambda: QUICK)
    # A thread of its own is stopped with a lock, and goes on then: the check looks no further.
    monkeypatch.setattr(_stopped_threads, "STOPPED_S_MAX", 1.0)
    await check(partial(bounded_fs, tmp_path))


async def test_check_backend_runs_all_checks(tmp_path: Path) -> None:
    await check_backend(memory)
    await check_backend(partial(fs, tmp_path, "kvtier"), persistent=True)


async def test_a_torn_load_that_its_digest_reveals_is_allowed_where_calls_meet() -> None:
    make = partial(TearsLoadsThatMeet.from_options, {"capacity_bytes": CAPACITY_BYTES})
    await conformance.calls_may_meet_on_one_key(make)


async def test_memory_fails_the_persistence_checks() -> None:
    with pytest.raises(NotConforming):
        await check_backend(memory, persistent=True)


@pytest.mark.usefixtures("_no_shelves")
async def test_a_bounded_backend_that_persists_keeps_the_whole_contract() -> None:
    make = partial(Outlives.from_options, {"capacity_bytes": CAPACITY_BYTES})
    await check_backend(make, persistent=True)
    await check_backend(make, persistent=True)


class ListsHalf(Outlives):
    def contents(self) -> Iterable[Sequence[bytes]]:
        return [self.before[::2]]


class TripsOverStores(Outlives):
    def contents(self) -> Iterable[Sequence[bytes]]:
        return ([key] for key in self._kept)


class KeepsUnlistedBlocks(Outlives):
    """A store that was under way at the end left something that takes room."""

    async def open(self) -> None:
        await super().open()
        self._capacity_blocks -= bool(self.before)


class ForgetsAtTheEnd(Outlives):
    async def close(self) -> None:
        SHELVES.clear()


class HidesItFromReaders(Outlives):
    async def open(self) -> None:
        await super().open()
        if self.is_reader:
            self._kept = {}


FLAWED_SHELVES: dict[type[MemoryBackend], BackendCheck] = {
    ListsHalf: conformance.all_that_takes_room_is_listed,
    TripsOverStores: conformance.all_that_takes_room_is_listed,
    KeepsUnlistedBlocks: conformance.all_that_takes_room_is_listed,
    ForgetsAtTheEnd: conformance.blocks_outlive_the_backend,
    HidesItFromReaders: conformance.what_is_read_only_is_served,
}


@pytest.mark.usefixtures("_no_shelves")
@pytest.mark.parametrize(
    ("flawed", "check"), FLAWED_SHELVES.items(), ids=lambda value: value.__name__
)
async def test_a_flawed_backend_that_persists_fails_the_check_meant_for_it(
    flawed: type[MemoryBackend], check: BackendCheck
) -> None:
    with pytest.raises((NotConforming, RuntimeError)):
        await check(partial(flawed.from_options, {"capacity_bytes": CAPACITY_BYTES}))


class WantsTheMainThread(MemoryBackend):
    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: BackendContext) -> MemoryBackend:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        return super().from_options(options, context)


class FlipsABit(MemoryBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        loaded = list(await super().load(blocks))
        for block in blocks[5:6]:
            block.buffer[-1] ^= 1
        return loaded


class AnswersTooFew(MemoryBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        return list(await super().load(blocks))[:-1]


class SwapsAnswers(MemoryBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        return list(await super().load(blocks))[::-1]


class MakesUpDigests(MemoryBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        loaded = await super().load(blocks)
        return [
            answer
            if answer.digest is None
            else Loaded(Outcome.DONE, block_digest(block.key, block.buffer))
            for block, answer in zip(blocks, loaded, strict=True)
        ]


class LosesDigests(MemoryBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        return [answer._replace(digest=None) for answer in await super().load(blocks)]


class RaisesOnAMiss(MemoryBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        loaded = await super().load(blocks)
        if any(answer.outcome is Outcome.ABSENT for answer in loaded):
            raise KeyError
        return loaded


class RemembersRemoved(MemoryBackend):
    async def remove(self, keys: Sequence[bytes]) -> None:
        pass


class TripsOverUnknownKeys(MemoryBackend):
    async def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self._kept[key]


class IgnoresTheGroup(MemoryBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        return await super().load([block._replace(key=block.key[:-4]) for block in blocks])

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        return await super().store([block._replace(key=block.key[:-4]) for block in blocks])


class KeepsAViewOnly(MemoryBackend):
    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        outcomes = await super().store(blocks)
        for block in blocks:
            self._kept[block.key] = self._kept[block.key]._replace(block=block.buffer)
        return outcomes


class WritesPastItsBuffer(MemoryBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        loaded = await super().load(blocks)
        for block in blocks:
            whole = memoryview(block.buffer.obj)
            whole[0] = (whole[0] + 1) % 256
        return loaded


class ProbeSaysYes(MemoryBackend):
    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [True for _ in keys]


class ProbeSaysNo(MemoryBackend):
    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return [False for _ in keys]


class HasNoBound(MemoryBackend):
    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        self._capacity_blocks = 10**9
        return await super().store(blocks)


class RefusesTheSecondStore(MemoryBackend):
    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        known = {block.key for block in blocks if block.key in self._kept}
        outcomes = await super().store(blocks)
        return [
            Outcome.FAILED if block.key in known else outcome
            for block, outcome in zip(blocks, outcomes, strict=True)
        ]


class MixesStores(MemoryBackend):
    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        known = [block for block in blocks if block.key in self._kept]
        outcomes = await super().store(blocks)
        for block in known:
            self._kept[block.key] = self._kept[block.key]._replace(digest=block.digest)
        return outcomes


class TripsOverNothing(MemoryBackend):
    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        blocks[0]
        return await super().store(blocks)


class OneCallAtATime(MemoryBackend):
    busy = False

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        if self.busy:
            return [Outcome.FAILED for _ in blocks]
        self.busy = True
        await anyio.lowlevel.checkpoint()
        self.busy = False
        return await super().store(blocks)


class CountsInFloats(MemoryBackend):
    def counters(self) -> Mapping[str, int]:
        return {"blocks": 1.5}


class CountsWhatThereIsNow(MemoryBackend):
    def counters(self) -> Mapping[str, int]:
        return {"blocks_now": len(self._kept)}


class ClosesOnce(MemoryBackend):
    async def close(self) -> None:
        self._kept.clear()
        del self._kept


class HangsInALoad(MemoryBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        await anyio.sleep_forever()
        return await super().load(blocks)


class ChangesWhatItStores(MemoryBackend):
    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        outcomes = await super().store(blocks)
        for block in blocks:
            memoryview(block.buffer.obj)[0] ^= 1
        return outcomes


class DiesOfCancellation(MemoryBackend):
    dead = False

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        if self.dead:
            return [Outcome.FAILED for _ in blocks]
        self.dead = True
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        self.dead = False
        return await super().store(blocks)


class TearsLoadsThatMeet(MemoryBackend):
    """As storage that gives a removed block's room to another one, which is read in its place."""

    loads = 0

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        loaded = await super().load(blocks)
        self.loads += 1
        await anyio.lowlevel.checkpoint()
        for block in blocks if self.loads > 1 else ():
            block.buffer[-1] ^= 1
        self.loads -= 1
        return loaded


class HidesThatLoadsAreTorn(MakesUpDigests, TearsLoadsThatMeet):
    pass


class PadsToPages(MemoryBackend):
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        loaded = await super().load(blocks)
        for block in blocks:
            whole = len(block.buffer) // 4096 * 4096
            block.buffer[whole:] = bytes(len(block.buffer) - whole)
        return loaded


SHELF: dict[str, MemoryBackend] = {}


class SharesAllNamespaces(MemoryBackend):
    """One dictionary for all models."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._kept = SHELF.setdefault("kept", self._kept)

    async def close(self) -> None:
        pass


FLAWED: dict[type[MemoryBackend], BackendCheck] = {
    WantsTheMainThread: conformance.it_may_be_made_in_any_thread,
    FlipsABit: conformance.blocks_come_back_byte_exact,
    AnswersTooFew: conformance.blocks_come_back_byte_exact,
    SwapsAnswers: conformance.blocks_come_back_byte_exact,
    KeepsAViewOnly: conformance.blocks_come_back_byte_exact,
    HangsInALoad: conformance.blocks_come_back_byte_exact,
    LosesDigests: conformance.blocks_come_back_byte_exact,
    RaisesOnAMiss: conformance.a_load_of_a_missing_key_is_absent,
    ProbeSaysYes: conformance.a_probe_tells_what_is_there,
    ProbeSaysNo: conformance.a_probe_tells_what_is_there,
    RefusesTheSecondStore: conformance.storing_twice_is_done,
    MixesStores: conformance.storing_twice_is_done,
    RemembersRemoved: conformance.a_removed_key_is_absent,
    TripsOverUnknownKeys: conformance.a_removed_key_is_absent,
    MakesUpDigests: conformance.the_digest_is_kept_not_made_up,
    OneCallAtATime: conformance.calls_may_overlap,
    HidesThatLoadsAreTorn: conformance.calls_may_meet_on_one_key,
    TripsOverNothing: conformance.any_number_of_blocks_is_a_batch,
    IgnoresTheGroup: conformance.keys_are_distinguished_byte_by_byte,
    WritesPastItsBuffer: conformance.a_load_stays_in_its_buffer,
    ChangesWhatItStores: conformance.a_load_of_a_missing_key_is_absent,
    HasNoBound: conformance.a_full_store_says_so,
    DiesOfCancellation: conformance.a_cancelled_call_harms_no_other,
    ClosesOnce: conformance.reopening_serves_nothing_wrong,
    SharesAllNamespaces: conformance.namespaces_do_not_mix,
    PadsToPages: conformance.odd_block_sizes_work_or_are_refused,
    CountsInFloats: conformance.counters_are_counts,
    CountsWhatThereIsNow: conformance.counters_are_counts,
}


@pytest.mark.parametrize(("flawed", "check"), FLAWED.items(), ids=lambda value: value.__name__)
async def test_a_flawed_backend_fails_the_check_meant_for_it(
    flawed: type[MemoryBackend], check: BackendCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each flaw is one that a real driver might have; a suite that passes it is no use."""
    if flawed is HangsInALoad:
        monkeypatch.setattr(_workbench, "CHECK_TIMEOUT_S_MAX", 0.05)
    make: MakeBackend = partial(flawed.from_options, {"capacity_bytes": CAPACITY_BYTES})
    with pytest.raises((Exception, BaseExceptionGroup)):
        await check(make)


def test_every_check_has_a_flaw_that_it_finds() -> None:
    found = {*FLAWED.values(), *(check for check, _ in FLAWS.values())}
    assert found == set(BACKEND_CHECKS)
    assert set(FLAWED_SHELVES.values()) == set(PERSISTENCE_CHECKS)
