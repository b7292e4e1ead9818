"""What a server's misbehaviour becomes: an outcome a block, and never a wrong byte."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Connection, LoadBlock, Outcome
from tests.support.s3_fault_server import OF_BLOCKS, Fault
from tests.unit.backends.s3._s3 import BLOCK_BYTES, data_of, key_of, open_s3

if TYPE_CHECKING:
    from tests.support.s3_fault_server import FaultServer

pytestmark = pytest.mark.anyio

Faulty = tuple["FaultServer", str]
DONE, ABSENT, DAMAGED = Outcome.DONE, Outcome.ABSENT, Outcome.DAMAGED
FAILED, FULL = Outcome.FAILED, Outcome.FULL


def blocks_in(server: FaultServer) -> list[str]:
    return [path for path in server.objects if OF_BLOCKS.search(path)]


IN_AN_ANSWER = (Fault.RESET, Fault.SHORT)
MAY_PASS = (Fault.SLOW_DOWN, Fault.TOO_MANY, Fault.ERROR, Fault.TIMED_OUT, Fault.HALF_A_BODY)


@pytest.mark.parametrize("fault", [*IN_AN_ANSWER, *MAY_PASS, Fault.CONFLICT])
async def test_what_may_pass_is_tried_again(faulty: Faulty, fault: Fault) -> None:
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        assert await s3.store(1) == [DONE]
        if fault is not Fault.CONFLICT:  # of two stores of one key
            server.misbehave(fault, "GET", times=2)
            assert await s3.load(1) == [DONE]
            assert server.count("GET") == 3
        if fault not in IN_AN_ANSWER:
            server.misbehave(fault, "PUT", times=2)
            assert await s3.store(2) == [DONE]
            assert server.count("PUT") == 4
        assert s3.states == [Connection.CONNECTING, Connection.UP]


@pytest.mark.parametrize("fault", [Fault.SLOW_DOWN, Fault.TOO_MANY])
async def test_a_server_that_is_busy_is_sent_fewer_requests_for_a_while(
    faulty: Faulty, fault: Fault
) -> None:
    server, endpoint = faulty
    async with open_s3(endpoint, requests_max=8) as s3:
        server.misbehave(fault, "PUT", times=1)
        assert await s3.store(*range(8)) == [DONE] * 8
        assert s3.count("slow_downs") == 1
        assert s3.count("requests_limit") < 8
        for first in range(10, 200, 8):
            await s3.store(*range(first, first + 8))
        assert s3.count("requests_limit") == 8
        assert server.running_max <= 8


async def test_request_timeout_s_bounds_a_call_without_a_deadline(faulty: Faulty) -> None:
    server, endpoint = faulty
    async with open_s3(endpoint, request_timeout_s=0.1) as s3:
        server.misbehave(Fault.HANG)
        assert await s3.store(1) == [FAILED]
        server.misbehave_always(Fault.HANG)
        with pytest.raises(StoreFault):
            await s3.backend.remove([key_of(1)])


async def test_an_object_is_the_block_alone_and_nothing_behind_it(faulty: Faulty) -> None:
    """A few bytes more are a packet of their own, for which some servers wait for the client."""
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        await s3.store(1)
        (path,) = blocks_in(server)
        assert server.objects[path] == data_of(1)


async def test_one_block_that_fails_takes_nothing_from_the_others(faulty: Faulty) -> None:
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        server.misbehave(Fault.OUT_OF_ROOM, "PUT", times=1)
        outcomes = await s3.store(1, 2, 3, 4)
        assert sorted(outcomes) == [DONE, DONE, DONE, FULL]
        missing = [ABSENT if outcome is FULL else DONE for outcome in outcomes]
        assert await s3.load(1, 2, 3, 4) == missing


async def test_a_block_that_is_there_is_not_written_again(faulty: Faulty) -> None:
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        await s3.store(1)
        (path,) = blocks_in(server)
        there = server.objects[path]
        assert await s3.store(1) == [DONE]
        assert server.objects[path] is there
        assert s3.count("stores_known") == 1


async def test_a_server_without_conditional_put_gets_plain_ones(faulty: Faulty) -> None:
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        server.misbehave(Fault.NOT_IMPLEMENTED, "PUT")
        assert await s3.store(1, 2) == [DONE, DONE]
        before = server.count("PUT")
        assert await s3.store(3) == [DONE]
        assert server.count("PUT") == before + 1


async def test_a_load_that_was_cancelled_writes_nothing_later(faulty: Faulty) -> None:
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        await s3.store(1)
        server.misbehave(Fault.HANG, "GET", times=1)
        view = s3.view()
        view[:] = data_of(7)
        load = asyncio.create_task(s3.backend.load([LoadBlock(key_of(1), view)]))
        await s3.until(server.is_hanging.is_set)
        load.cancel()
        await asyncio.wait([load])
        assert load.cancelled()
        assert s3.backend.busy_threads() == 0
        server.behave()
        assert await s3.load(1) == [DONE]
        assert view == data_of(7)


async def test_a_cancelled_store_lets_go_of_its_buffer(faulty: Faulty) -> None:
    """Only then may the slot's memory be given back."""
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        server.misbehave(Fault.HANG, "PUT", times=1)
        store = asyncio.create_task(s3.store(1))
        await s3.until(server.is_hanging.is_set)
        store.cancel()
        await asyncio.wait([store])
        assert store.cancelled()
        await s3.until(lambda: s3.backend.busy_threads() == 0)
        server.behave()
        assert await s3.store(1) == [DONE]


async def test_removal_takes_many_blocks_in_one_request_and_says_if_it_fails(
    faulty: Faulty,
) -> None:
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        await s3.store(*range(10))
        await s3.backend.remove([key_of(number) for number in range(20)])
        assert not blocks_in(server)
        assert sum(method == "POST" for method, _ in server.requests) == 1
        server.misbehave_always(Fault.DENIED)
        with pytest.raises(StoreFault, match="403 AccessDenied"):
            await s3.backend.remove([key_of(1)])


async def test_each_request_is_counted_by_its_kind_as_the_server_counts_it(faulty: Faulty) -> None:
    """A provider bills those that fail, and those of the description, too."""
    server, endpoint = faulty
    async with open_s3(endpoint) as s3:
        server.misbehave(Fault.ERROR, "PUT GET", times=2)
        assert await s3.store(1, 2, 3) == [DONE] * 3
        server.misbehave(Fault.ERROR, "GET", times=1)
        assert await s3.load(1, 2, 9) == [DONE, DONE, ABSENT]
        assert await s3.probe(1, 9) == [True, False]
        await s3.backend.remove([key_of(number) for number in range(10)])
        methods = [method for method, _ in server.requests]
        kinds = {"PUT": "put", "GET": "get", "HEAD": "head", "POST": "delete"}
        there = {f"requests_{kind}": methods.count(method) for method, kind in kinds.items()}
        counts = s3.backend.counters()
        assert {name: counts[name] for name in there} == there
        of_description = sum(len(body) for path, body in server.objects.items())
        assert counts["bytes_put"] == 3 * BLOCK_BYTES + of_description
        assert counts["bytes_got"] == 2 * BLOCK_BYTES
