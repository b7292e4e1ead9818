"""Owners of memory die, the master hangs, the store is full: never a wrong byte."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.backend import (
    Connection,
    LoadBlock,
    Outcome,
    StoreBlock,
)
from kvtier.plugin_api.deadlines import time_limit
from kvtier_backends.mooncake import client as client_module
from tests.support.mooncake_server import (
    NO_LEASES,
    OWNERS_EXPIRE,
    SHORT_LEASES,
    Cluster,
    other_client,
    running,
)
from tests.support.patience import pause, until_true
from tests.unit.backends._media import key_of
from tests.unit.backends.mooncake._mooncake import (
    BLOCK_BYTES,
    SLOTS,
    Mooncake,
    begin_mooncake,
    data_of,
    open_mooncake,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A store for all tests that leave it as it was."""
    with running(tmp_path_factory.mktemp("mooncake")) as shared:
        yield shared


@pytest.fixture(scope="module")
def other(cluster: Cluster) -> Iterator[Any]:
    """Another program's client."""
    with other_client(cluster) as client:
        yield client


@pytest.mark.long  # ten seconds, until the master finds out; the gate has an owner that hangs
async def test_an_owner_that_was_killed_makes_misses_whatever_the_lookup_said(
    tmp_path: Path,
) -> None:
    with running(tmp_path, "64MB", *OWNERS_EXPIRE) as cluster:
        async with open_mooncake(cluster.address) as mooncake:
            assert await mooncake.store(1) is Outcome.DONE
            assert await mooncake.probe(1)
            cluster.owner.kill()
            assert await mooncake.load(1) in {Outcome.FAILED, Outcome.ABSENT}
            while await mooncake.probe(1):
                pause()  # the master finds out
            assert await mooncake.load(1) is Outcome.ABSENT
            assert await mooncake.store(1) in {Outcome.FAILED, Outcome.FULL}
            cluster.owner.start()
            while await mooncake.store(1) is not Outcome.DONE:
                pause()
            assert await mooncake.load(1) is Outcome.DONE


async def test_what_an_owner_had_that_died_and_came_back_empty_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no failure of the tier: the master goes on naming it, here for ten minutes."""
    with running(tmp_path) as cluster:
        async with open_mooncake(cluster.address) as mooncake:
            assert await mooncake.store(1) is await mooncake.store(2) is Outcome.DONE
            monkeypatch.setattr(client_module, "clock", lambda: 0.0)  # however busy the machine is
            cluster.owner.kill()
            assert await mooncake.probe(1)
            assert await mooncake.load(1) is Outcome.ABSENT
            cluster.owner.start()
            assert await mooncake.probe(2)
            assert await mooncake.load(2) is Outcome.ABSENT
            assert (mooncake.count("owners_gone"), mooncake.count("loads_failed")) == (2, 0)


async def test_a_lease_that_ends_within_a_load_is_a_miss_unless_the_block_is_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, "64MB", *NO_LEASES) as cluster:
        async with open_mooncake(cluster.address) as mooncake:
            assert await mooncake.store(1) is Outcome.DONE
            assert await mooncake.load(1) is Outcome.DONE
            real = client_module.StoreClient.get

            def replaced(client: Any, parts: Any, **options: Any) -> list[int]:
                codes = real(client, parts, **options)
                mooncake.slots.buffer[:] = bytes(SLOTS * BLOCK_BYTES)
                return codes

            monkeypatch.setattr(client_module.StoreClient, "get", replaced)
            assert await mooncake.load(1) is Outcome.ABSENT
            assert (mooncake.count("leases_expired"), mooncake.count("loads_failed")) == (1, 0)
        monkeypatch.undo()
        async with open_mooncake(cluster.address, compression="bitplane-zstd") as mooncake:
            assert await mooncake.store(2) is Outcome.DONE
            assert await mooncake.load(2) is Outcome.ABSENT
            assert (mooncake.count("leases_expired"), mooncake.count("loads_failed")) == (1, 0)


@pytest.mark.usefixtures("_short_waits")
async def test_an_owner_that_hangs_costs_a_call_its_time_and_its_bytes_are_not_served_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer that the library gave up may go on: the client ends before the load returns."""
    with running(tmp_path) as cluster:
        async with open_mooncake(cluster.address) as mooncake:
            assert await mooncake.store(1) is Outcome.DONE
            first = mooncake.backend._connection.client
            assert first is not None
            cluster.owner.stop()
            # As if each call took longer than the library waits for a transfer.
            times = iter(range(0, 100_000, 100))
            monkeypatch.setattr(client_module, "clock", lambda: next(times))
            assert await mooncake.load(1) is Outcome.FAILED
            assert first.is_ending
            first.wait_until_ended()
            monkeypatch.undo()
            cluster.owner.go_on()
            await mooncake.until_gone()
            await mooncake.until_up()
            assert mooncake.backend._connection.client is not first
            while await mooncake.store(2) is not Outcome.DONE:
                pause()
            assert await mooncake.load(2) is Outcome.DONE


@pytest.mark.usefixtures("_short_waits")
async def test_a_master_that_is_stopped_costs_a_call_its_time_and_nothing_else(
    tmp_path: Path,
) -> None:
    with running(tmp_path) as cluster:
        async with open_mooncake(cluster.address) as mooncake:
            assert await mooncake.store(1) is Outcome.DONE
            cluster.master.stop()
            given_up = asyncio.create_task(mooncake.load(1))
            await until_true(lambda: mooncake.backend.busy_threads() == 1)
            given_up.cancel()
            await asyncio.wait([given_up])
            assert given_up.cancelled()
            assert mooncake.backend.busy_threads() == 1  # its slot may still be written to
            with pytest.raises(StoreFault):
                await mooncake.probe(1)
            await mooncake.until_gone()
            await until_true(lambda: mooncake.backend.busy_threads() == 0)
            cluster.master.go_on()
            await mooncake.until_up()
            assert await mooncake.load(1) is Outcome.DONE


async def test_a_full_store_says_so_and_serves_what_it_has(tmp_path: Path) -> None:
    with running(tmp_path, "16MB", *SHORT_LEASES) as cluster:
        async with open_mooncake(cluster.address) as mooncake:
            outcomes = [await mooncake.store(number) for number in range(100)]
            assert set(outcomes) == {Outcome.DONE, Outcome.FULL}
            assert outcomes[:50] == [Outcome.DONE] * 50
            assert mooncake.count("stores_full") == outcomes.count(Outcome.FULL)
            loaded = [await mooncake.load(number) for number in range(100)]
            assert set(loaded) == {Outcome.DONE, Outcome.ABSENT}  # the store evicts
            assert Outcome.DONE not in [
                there for there, kept in zip(loaded, outcomes, strict=True) if kept is Outcome.FULL
            ]


async def test_a_store_that_others_use_too_serves_no_wrong_byte(
    cluster: Cluster, other: Any
) -> None:
    """With one client for all of these: to close one takes the library a second."""
    async with open_mooncake(cluster.address) as mooncake:
        for promise in (
            a_block_that_is_there_is_not_replaced,
            a_block_is_removed_though_somebody_has_a_lease_on_it,
            a_buffer_outside_the_slots_is_refused,
            what_nobody_waits_for_any_more_is_not_begun,
        ):
            await promise(mooncake, other)


async def a_block_that_is_there_is_not_replaced(mooncake: Mooncake, _other: Any) -> None:
    assert await mooncake.store(1) is Outcome.DONE
    assert await mooncake.store(1, data_of(2)) is Outcome.DONE
    assert await mooncake.load(1) is Outcome.DONE  # and right, in all bytes


async def a_block_is_removed_though_somebody_has_a_lease_on_it(
    mooncake: Mooncake, other: Any
) -> None:
    assert await mooncake.store(3) is Outcome.DONE
    assert other.is_exist(mooncake.name_of(3)) == 1
    assert other.remove(mooncake.name_of(3)) == -706
    await mooncake.backend.remove([key_of(3), key_of(4)])
    assert other.is_exist(mooncake.name_of(3)) == 0
    assert await mooncake.load(3) is Outcome.ABSENT


async def a_buffer_outside_the_slots_is_refused(mooncake: Mooncake, _other: Any) -> None:
    """No client knows it: over RDMA it could not be read, nor written to."""
    elsewhere = memoryview(bytearray(BLOCK_BYTES))
    with pytest.raises(Misuse, match="register_memory"):
        await mooncake.backend.load([LoadBlock(key_of(7), elsewhere)])
    with pytest.raises(Misuse, match="register_memory"):
        await mooncake.backend.store([StoreBlock(key_of(7), elsewhere, bytes(16))])
    assert mooncake.slots.slot_count == SLOTS


async def what_nobody_waits_for_any_more_is_not_begun(mooncake: Mooncake, _other: Any) -> None:
    with time_limit(0):
        assert await mooncake.store(8) is Outcome.FAILED
    assert not await mooncake.probe(8)
    assert await mooncake.store(8) is Outcome.DONE
    with time_limit(0):
        assert await mooncake.load(8) is Outcome.FAILED
    assert await mooncake.load(8) is Outcome.DONE


async def test_a_store_that_holds_another_namespace_is_not_used(
    cluster: Cluster, other: Any
) -> None:
    prefix = {"key_prefix": "described"}
    async with open_mooncake(cluster.address, **prefix) as mooncake:
        name = mooncake.name_of(1).rpartition("/")[0] + "/namespace.json"
        await until_true(lambda: mooncake.backend._connection._namespace.is_settled)
    described = other.get(name)
    assert b'"model_name": "org/m"' in described
    assert other.remove(name, True) == 0
    assert other.put(name, described.replace(b"262144", b"131072")) == 0
    async with begin_mooncake(cluster.address, **prefix) as mooncake:
        await until_true(lambda: mooncake.count("connects_failed") > 0)
        assert mooncake.states == [Connection.CONNECTING]
        assert other.remove(name, True) == 0
        await mooncake.until_up()
    assert other.get(name) == described


@pytest.mark.long  # nine seconds, of the library's own moving of blocks
async def test_blocks_that_were_moved_to_an_ssd_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times as many as there is memory for."""
    monkeypatch.setenv("MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS", "1")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT", "16")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES", str(32 << 20))
    (tmp_path / "ssd").mkdir()
    cluster = Cluster(tmp_path, "16MB", *SHORT_LEASES, "--enable_offload=true")
    try:
        cluster.master.start()
        async with open_mooncake(
            cluster.address, segment_bytes="16MiB", ssd_offload_path=str(tmp_path / "ssd")
        ) as mooncake:
            kept = 0
            while kept < 240:
                kept += await mooncake.store(kept) is Outcome.DONE
            loaded = [await mooncake.load(number) for number in range(kept)]
            assert set(loaded) <= {Outcome.DONE, Outcome.ABSENT}
            assert loaded.count(Outcome.DONE) > 100  # 16 MiB of memory hold 64
    finally:
        cluster.kill()
