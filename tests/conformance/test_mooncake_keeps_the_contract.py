"""The mooncake tier passes the shipped suite, on a real master and a real owner of memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvtier.testing import (
    BACKEND_CHECKS,
    PERSISTENCE_CHECKS,
    BackendCheck,
    backend_books,
    backend_calls,
    conformance,
)
from kvtier.testing._workbench import new_blocks, opened
from kvtier_backends.mooncake import MooncakeBackend, registered
from tests.conformance._together import together
from tests.support.mooncake_server import running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.plugin_api.backend import BackendContext


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("mooncake")) as cluster:
        yield cluster.address


def mooncake(address: str, context: BackendContext) -> MooncakeBackend:
    return MooncakeBackend.from_options({"master": address}, context)


pytestmark = [pytest.mark.anyio, pytest.mark.slow]  # the library takes a second to close a client

MOVES_BYTES = (
    conformance.blocks_come_back_byte_exact,
    conformance.a_load_stays_in_its_buffer,
    conformance.calls_may_meet_on_one_key,
    conformance.any_number_of_blocks_is_a_batch,
)
ODD_SIZES = conformance.odd_block_sizes_work_or_are_refused
COUNTS_THREADS = backend_calls.busy_threads_counts_who_may_touch_a_buffer
ALONE = (
    backend_calls.a_cancelled_call_ends,
    COUNTS_THREADS,
    backend_calls.no_call_blocks_the_event_loop,
)
"""These stop threads, or measure time."""

LONG = (
    conformance.reopening_serves_nothing_wrong,  # blocks_outlive_the_backend is stricter
    ODD_SIZES,  # those of a tier that compresses are odder
    # The next four are about a capacity, which the store has and the tier doesn't.
    conformance.a_full_store_says_so,
    conformance.all_that_takes_room_is_listed,
    backend_books.what_is_left_after_a_restart_is_listed,
    backend_books.what_is_lost_is_told,
)
"""Of these, opening and closing a client is all that takes time."""

ALL = BACKEND_CHECKS + PERSISTENCE_CHECKS
OTHERS = [each for each in ALL if each not in {*ALONE, *LONG}]


@pytest.mark.parametrize(
    "check", [*ALONE, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)]
)
async def test_mooncake_keeps_the_contract(check: BackendCheck, address: str) -> None:
    await check(partial(mooncake, address))


async def test_mooncake_keeps_the_rest_of_the_contract(address: str) -> None:
    await together(OTHERS)(partial(mooncake, address))


@pytest.mark.parametrize(
    "check",
    [
        together(MOVES_BYTES),
        COUNTS_THREADS,
        pytest.param(ODD_SIZES, marks=pytest.mark.long),
    ],
    ids=lambda check: check.__name__,
)
async def test_mooncake_keeps_the_contract_without_a_copy(
    check: BackendCheck, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large blocks are moved; those of the suite are small."""
    monkeypatch.setattr(registered, "STAGED_BLOCK_BYTES_MAX", 0)
    await check(partial(mooncake, address))


async def test_what_one_client_has_stored_another_one_loads_until_one_removes_it(
    address: str,
) -> None:
    make = partial(mooncake, address)
    blocks = new_blocks(4)
    async with opened(make) as one, opened(make) as other:
        await one.keep(blocks)
        assert await other.backend.probe([block.key for block in blocks]) == [True] * 4
        await other.expect_kept(blocks)
        await other.backend.remove([block.key for block in blocks])
        await one.expect_absent(blocks)
