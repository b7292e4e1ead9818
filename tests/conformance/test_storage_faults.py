"""What storage does, and what it costs: one table for all backends.

A fault of the storage is never a wrong byte, and hits come back by themselves once it is over.
Servers that end, hang or come back empty are in ``test_server_faults.py``, networks that drop or
reset in ``tests/unit/backends/network``.
"""

from __future__ import annotations

import errno
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from structlog.testing import capture_logs

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Connection, Outcome, block_digest
from kvtier.plugin_api.deadlines import time_limit
from kvtier.testing._workbench import context, new_block, new_blocks, opened
from kvtier_backends.redis import servers
from kvtier_backends.shared import kept_connection
from tests.conformance import _faulty_storage as on
from tests.conformance._faulty_storage import BLOCK_BYTES, Record
from tests.support.needs import needs
from tests.support.patience import until_true
from tests.support.s3_fault_server import Fault

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvtier.testing._workbench import Bench, Block
    from tests.conformance._faulty_storage import Fails, Storage

    MakeStorage = Callable[[Path], AbstractContextManager[Storage]]

pytestmark = pytest.mark.anyio
ABSENT, DAMAGED, DONE = Outcome.ABSENT, Outcome.DAMAGED, Outcome.DONE
FAILED, FULL = Outcome.FAILED, Outcome.FULL


class Costs(NamedTuple):
    """What calls meet while a fault lasts."""

    load: Outcome
    store: Outcome
    may_open: bool = False  #: a backend, and then meets the same
    is_gone: bool = False  #: the connection, as nothing can be done without what is missing
    fails_after_s: float | None = None  #: what is tried again until its time is over


NO_ROOM = Costs(DONE, FULL, may_open=True)
NO_WRITES = Costs(DONE, FAILED, may_open=True)
NO_SERVICE = Costs(FAILED, FAILED, is_gone=True)
NO_SUCCESS = Costs(FAILED, FAILED, fails_after_s=0.1)
VALKEY, SMALL, FUSE = partial(on.redis, "valkey"), on.small_files, on.files_on_fuse
BOTH = {"valkey": VALKEY, "redis": partial(on.redis, "redis")}
S3, FULL_FS, SICK_FS = {"s3": on.s3}, {"fs": SMALL}, {"fs": FUSE}
TABLE: tuple[tuple[dict[str, Any], str, Any, Costs, str], ...] = (
    (BOTH, "maxmemory", on.sets("maxmemory"), NO_ROOM, "maxmemory-policy"),
    (BOTH, "replicas", on.sets("min-replicas-to-write"), NO_WRITES, "min-replicas-to-write"),
    (BOTH, "is a replica", on.is_a_replica, NO_WRITES, "is a replica"),
    (BOTH, "cannot save", on.cannot_save, NO_WRITES, "stop-writes-on-bgsave-error"),
    (BOTH, "no master", on.has_lost_its_master, NO_SERVICE, ""),
    (S3, "busy", on.answers(Fault.SLOW_DOWN), NO_SUCCESS, ""),
    (S3, "error", on.answers(Fault.ERROR), NO_SUCCESS, ""),
    (S3, "hangs", on.answers(Fault.HANG), NO_SUCCESS, ""),
    (S3, "ends in answers", on.answers(Fault.SHORT), NO_SUCCESS._replace(store=DONE), ""),
    (S3, "no room", on.answers(Fault.OUT_OF_ROOM, "PUT"), NO_ROOM, ""),
    (S3, "no quota", on.answers(Fault.QUOTA, "PUT"), NO_ROOM, ""),
    (S3, "may not put", on.no_puts, NO_WRITES, "s3:PutObject"),
    (S3, "denied", on.answers(Fault.DENIED, "ALL"), NO_SERVICE, "list the bucket"),
    (S3, "expired", on.answers(Fault.EXPIRED, "ALL"), NO_SERVICE, "has expired"),
    (S3, "clocks differ", on.answers(Fault.SKEWED, "ALL"), NO_SERVICE, "clock"),
    (S3, "unknown", on.answers(Fault.UNKNOWN_KEY, "ALL"), NO_SERVICE, "keys of a user"),
    (FULL_FS, "no room", on.no_room, NO_ROOM, "full since"),
    (FULL_FS, "no inodes", on.no_inodes, NO_ROOM, "no inodes are left"),
    (FULL_FS, "no quota", on.no_quota, NO_ROOM, "full since"),
    (SICK_FS, "EROFS", on.fails(errno.EROFS, *on.WRITING), Costs(DONE, FAILED), "Read-only"),
    (SICK_FS, "EACCES", on.fails(errno.EACCES, "open", "create"), Costs(FAILED, FAILED), "denied"),
    (SICK_FS, "ESTALE", on.fails(errno.ESTALE, "open"), Costs(ABSENT, DONE), ""),
    (SICK_FS, "ESTALE in a read", on.fails(errno.ESTALE, "read"), Costs(ABSENT, DONE), ""),
)
"""Storage, its fault, what that costs, and what the log says of it, once for each backend."""

NEEDS = {SMALL: [needs("mount")], FUSE: [needs("fuse")]}


@pytest.fixture(autouse=True)
def _tries_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_connection, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(kept_connection, "PAUSE_S_MAX", 0.05)
    monkeypatch.setattr(servers, "CHECK_S", 1e6)  # what is noticed is noticed by a call, or at once


@pytest.mark.parametrize(
    ("make_storage", "fault", "costs", "said"),
    [
        pytest.param(make, *row, id=f"{kind}: {name}", marks=NEEDS.get(make, []))
        for storages, name, *row in TABLE
        for kind, make in storages.items()
    ],
)
async def test_a_fault_costs_what_its_row_says(
    make_storage: MakeStorage, fault: Fails, costs: Costs, said: str, tmp_path: Path
) -> None:
    kept, where = new_blocks(2, BLOCK_BYTES), context(BLOCK_BYTES)
    with make_storage(tmp_path) as storage, capture_logs() as lines:
        async with AsyncExitStack() as stack:
            bench = await stack.enter_async_context(opened(storage.make, where))
            await bench.keep(kept)
            tried = [(bench, kept)]
            with fault(storage):
                await _meets(bench, costs, kept)
                if costs.may_open:
                    if bench.backend.traits.connects:  # to describe its blocks there first
                        kept, where = [], context(BLOCK_BYTES, "another/model")
                    other = await stack.enter_async_context(opened(storage.make, where, again=True))
                    await _meets(other, costs, kept)
                    tried.append((other, kept))
            for each, there in tried:
                if costs.is_gone:
                    await until_true(lambda: bench.states[-1] is Connection.UP)
                new = new_blocks(1, BLOCK_BYTES)
                await each.keep(new)
                await each.expect_kept([*there, *new])
                counts = each.backend.counters()
                assert (counts.get("stores_full", 0) > 0) == (costs.store is FULL), counts
                assert (counts.get("loads_failed", 0) > 0) == (costs.load is FAILED), counts
    told = [line for line in lines if _tells(line, costs) and said in str(line)]
    assert not said or len(told) == 1 + costs.may_open, lines


async def _meets(bench: Bench, costs: Costs, kept: Sequence[Block]) -> None:
    new = new_blocks(1, BLOCK_BYTES)
    for _ in range(2):
        with _limit(costs, costs.load):
            assert await _outcomes(bench, kept) == [costs.load] * len(kept)
        with _limit(costs, costs.store):
            assert await bench.store(new) == [costs.store]
    if costs.is_gone:
        await until_true(lambda: bench.states[-1] is Connection.GONE)
        for call in (bench.backend.probe, bench.backend.remove):
            with pytest.raises(StoreFault):
                await call([kept[0].key])


def _limit(costs: Costs, outcome: Outcome) -> AbstractContextManager[object]:
    limit_s = costs.fails_after_s if outcome is FAILED else None
    return nullcontext() if limit_s is None else time_limit(limit_s)


def _tells(line: Mapping[str, Any], costs: Costs) -> bool:
    """Tell whether a line of the log is about the fault, and not about what follows from it."""
    if costs.is_gone:
        return "not connected" in line["event"]
    kind = "loads_failed" if costs.load is FAILED else f"stores_{costs.store.name.lower()}"
    return line.get("kind") == kind


async def _outcomes(bench: Bench, blocks: Sequence[Block]) -> list[Outcome]:
    """Load, and judge the bytes as the layer above does: by the digest that came with them."""
    outcomes = []
    for slot, (block, answer) in enumerate(zip(blocks, await bench.load(blocks), strict=True)):
        is_done = answer.outcome is DONE
        if is_done and answer.digest != block_digest(block.key, bench.slots.view(slot)):
            outcomes.append(DAMAGED)
            continue
        if is_done:
            bench.expect_block(block, answer, slot)
        outcomes.append(answer.outcome)
    return outcomes


# --- what lies in a block's place ---


def _flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 4
    return bytes(changed)


HARMS: dict[str, Callable[[Record, Record], Record]] = {
    "zeros": lambda own, _: Record(bytes(len(own.block)), bytes(len(own.trailer))),
    "junk": lambda own, _: Record(b"x" * len(own.block), b"x" * len(own.trailer)),
    "its first bit": lambda own, _: own._replace(block=_flipped(own.block, 0)),
    "its last bit": lambda own, _: own._replace(block=_flipped(own.block, -1)),
    "another one": lambda _, other: other,
    "another one's bytes": lambda own, other: own._replace(block=other.block),
}
OTHER_LENGTHS: dict[str, Callable[[Record, Record], Record]] = {
    "nothing": lambda *_: Record(b""),
    "one byte": lambda *_: Record(b"x"),
    "an end within a page": lambda own, _: Record(own.block[:511]),
    "an end after a page": lambda own, _: Record(own.block[:4096]),
    "all but a byte": lambda own, _: Record(own.block[:-1]),
    "an end in the trailer": lambda own, _: own._replace(trailer=own.trailer[:-1]),
    "a byte of the trailer": lambda own, _: own._replace(trailer=own.trailer[:1]),
    "twice as much": lambda own, _: own._replace(block=own.block * 2),
    "a bit of the trailer": lambda own, _: own._replace(trailer=_flipped(own.trailer, -9)),
    "another one's trailer": lambda own, other: own._replace(trailer=other.trailer),
}


KINDS: dict[str, MakeStorage] = {
    "fs": lambda path: nullcontext(on.Files(path)),
    "fs, buffered": lambda path: nullcontext(on.Files(path, direct=False)),
    "fs, vLLM's": lambda path: nullcontext(on.Files(path, layout="vllm")),
    "disk": lambda path: nullcontext(on.Disk(path)),
    "valkey": VALKEY,
    "s3": on.s3,
    "mooncake": on.mooncake,
}
NO_KEYS = {"fs, buffered", "fs, vLLM's", "disk"}


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_not_a_blocks_own_is_damaged_until_it_is_stored_again(
    kind: str, tmp_path: Path
) -> None:
    """It costs no other block, and its removal, which the layer above sees to, is all it needs."""
    with KINDS[kind](tmp_path) as storage:
        async with opened(storage.make, context(BLOCK_BYTES)) as bench:
            harms = HARMS if storage.keeps_lengths else {**HARMS, **OTHER_LENGTHS}
            for name, harm in harms.items():
                blocks = first, second, _ = new_blocks(3, BLOCK_BYTES)
                await bench.keep(blocks)
                records = [storage.read(bench.backend, each.key) for each in (second, first)]
                storage.write(bench.backend, second.key, harm(*records))
                await _is_damaged(bench, blocks, name)
            for own_harm in storage.own_harms:
                blocks = new_blocks(3, BLOCK_BYTES)
                await bench.keep(blocks)
                own_harm(bench.backend, blocks[1].key)
                await _is_damaged(bench, blocks, own_harm.__name__)
            if not storage.keeps_lengths:
                blocks = new_blocks(3, BLOCK_BYTES)
                await bench.keep(blocks)
                storage.remove(bench.backend, blocks[1].key)
                assert await _outcomes(bench, blocks) == [DONE, ABSENT, DONE]


async def _is_damaged(bench: Bench, blocks: Sequence[Block], what: str) -> None:
    assert await _outcomes(bench, blocks) == [DONE, DAMAGED, DONE], what
    await bench.backend.remove([blocks[1].key])
    await bench.keep(blocks[1:2])
    await bench.expect_kept(blocks)
    await bench.backend.remove([block.key for block in blocks])


KEYS = {"OURS": "ab" * 32, "THEIRS": "cd" * 32}


@pytest.mark.parametrize("option", ["auth_key_env", "encryption_key_env"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NO_KEYS])
async def test_with_keys_what_others_plant_is_a_miss(
    kind: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a sound record: of a tier that has no key, or another one."""
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    blocks = own, other = new_blocks(2, BLOCK_BYTES)
    planted = new_block(BLOCK_BYTES, key=own.key)
    where = context(BLOCK_BYTES)
    with KINDS[kind](tmp_path) as storage:
        async with (
            opened(lambda context: storage.make(context, **{option: "OURS"}), where) as ours,
            opened(lambda context: storage.make(context, **{option: "THEIRS"}), where) as theirs,
            opened(storage.make, where) as plain,
        ):
            await plain.keep([planted])
            await ours.keep(blocks)
            is_readable = own.data[:64] in storage.read(ours.backend, own.key).block
            assert is_readable is (option == "auth_key_env")
            storage.write(ours.backend, own.key, storage.read(plain.backend, own.key))
            assert await _outcomes(ours, blocks) == [DAMAGED, DONE]
            await ours.backend.remove([own.key])
            await theirs.keep([planted])
            assert await _outcomes(ours, blocks) == [DAMAGED, DONE]
            assert await _outcomes(theirs, [planted, other]) == [DONE, DAMAGED]
            for bench in (ours, theirs):
                assert bench.backend.counters()["unauthenticated"] > 0
            await plain.expect_kept([planted])  # it has names of its own
