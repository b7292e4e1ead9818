"""Checks a remote-storage backend whose server fails: misses, and recovery by itself.

For the author of a backend, with a server that the test starts and owns::

    @pytest.mark.anyio
    @pytest.mark.parametrize("fault", ServerFault)
    async def test_my_backend_survives_its_server(fault: ServerFault, server: MyServer) -> None:
        await check_server_fault(make, server, fault)

It checks outcomes and bytes, never how long something takes: a call that has a deadline
must end, a block must come back whole or not at all, and nothing may reach a buffer late.
"""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

import anyio

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Connection, Outcome
from kvtier.plugin_api.deadlines import time_limit
from kvtier.testing._workbench import Bench, MakeBackend, expect, new_blocks, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.plugin_api.backend import Loaded
    from kvtier.testing._workbench import Block

CALL_S: Final = 0.5
"""Time limit of a call while the server fails: it must run out."""

_POLL_S: Final = 0.01
_BLOCKS: Final = 4
_LATE_SLOT, _LATER_SLOT = 8, 16  # of blocks that are loaded while it fails, and after that
_GUARD: Final = b"\xa5"


class FaultyServer(Protocol):
    """A server's process, which the check may end, stop and start again. It runs at first."""

    def kill(self) -> None:
        """End it at once, as a power cut would."""

    def start(self) -> None:
        """Start it again at the same address, and return once it responds."""

    def stop(self) -> None:
        """Let it hang (``SIGSTOP``): connections to it stay open, but get no response."""

    def go_on(self) -> None:
        """Let it respond again (``SIGCONT``), also to requests sent meanwhile."""


class ServerFault(Enum):
    """Fault of the server."""

    KILLED = "killed"  #: and started again, with the blocks that it has kept, if any
    EMPTIED = "restarted empty"  #: killed, and started again without a block
    STOPPED = "stopped"  #: and continued, with all its blocks


async def check_server_fault(make: MakeBackend, server: FaultyServer, fault: ServerFault) -> None:
    """Let the server fail under an open backend, and recover. The server runs again afterwards.

    Raises ``NotConforming``, which names the broken promise. ``make`` gives the backend short
    times to connect and between two tries, or the check takes as long as these.
    """
    async with opened(make) as bench:
        blocks = new_blocks(_BLOCKS)
        await bench.keep(blocks)
        await bench.expect_kept(blocks)
        if fault is ServerFault.STOPPED:
            await _stop(bench, server, blocks)
        else:
            await _kill(bench, server, blocks)
            await _expect_whole_or_missing(bench, blocks, may_be_there=fault is ServerFault.KILLED)
        more = new_blocks(_BLOCKS)
        await _until_done(bench, more)
        await bench.expect_kept(more)


async def _kill(bench: Bench, server: FaultyServer, blocks: Sequence[Block]) -> None:
    server.kill()
    try:
        await _expect_misses(bench, blocks)
        if bench.backend.traits.connects:
            await _until(lambda: bench.states[-1:] == [Connection.GONE], bench, blocks)
    finally:
        server.start()
    if bench.backend.traits.connects:
        await _until(lambda: bench.states[-1:] == [Connection.UP], bench, blocks)
    else:
        await _until_done(bench, new_blocks(1))


async def _stop(bench: Bench, server: FaultyServer, blocks: Sequence[Block]) -> None:
    server.stop()
    try:
        await _expect_misses(bench, blocks)
        while bench.backend.busy_threads():
            await _pause()
        views = [bench.slots.view(_LATE_SLOT + index) for index in range(len(blocks))]
        for view in views:
            view[:] = _GUARD * len(view)
    finally:
        server.go_on()
    while not all(
        answer is not None and answer.outcome is Outcome.DONE
        for answer in await _load(bench, blocks, slot=_LATER_SLOT)
    ):
        await _pause()
    await bench.expect_kept(blocks, slot=_LATER_SLOT)
    late = any(view != _GUARD * len(view) for view in views)
    expect(not late, "a late response of the server must not reach a buffer that was given back")


async def _expect_misses(bench: Bench, blocks: Sequence[Block]) -> None:
    """Load and store while the server does not respond. Each call must end by its deadline."""
    with time_limit(CALL_S):
        loaded = await _load(bench, blocks, slot=_LATE_SLOT)
    done = any(answer is not None and answer.outcome is Outcome.DONE for answer in loaded)
    expect(not done, "no load may be DONE while the server does not answer")
    stored: list[Outcome] = []
    with time_limit(CALL_S), suppress(StoreFault):
        stored = await bench.store(new_blocks(_BLOCKS))
    expect(Outcome.DONE not in stored, "no store may be DONE while the server does not answer")


async def _expect_whole_or_missing(
    bench: Bench, blocks: Sequence[Block], *, may_be_there: bool
) -> None:
    for index, (block, answer) in enumerate(zip(blocks, await bench.load(blocks), strict=True)):
        if answer.outcome is Outcome.DONE and may_be_there:
            bench.expect_block(block, answer, index)
        else:
            absent = answer.outcome is Outcome.ABSENT
            expect(absent, f"a block that the server has lost must be ABSENT, got {answer}")


async def _until(done: Callable[[], bool], bench: Bench, blocks: Sequence[Block]) -> None:
    """Keep loading, as an engine might, until the backend has reported the change."""
    while not done():
        with time_limit(CALL_S):
            await _load(bench, blocks, slot=_LATE_SLOT)
        await _pause()


async def _until_done(bench: Bench, blocks: Sequence[Block]) -> None:
    """Store the blocks, which must be possible again eventually."""
    outcomes: list[Outcome] = []
    while outcomes != [Outcome.DONE] * len(blocks):
        with suppress(StoreFault):
            outcomes = await bench.store(blocks)
        await _pause()


async def _load(bench: Bench, blocks: Sequence[Block], *, slot: int) -> Sequence[Loaded | None]:
    """Load as the layer above does: a call that raises has loaded nothing."""
    try:
        return await bench.load(blocks, slot=slot)
    except StoreFault:
        return [None] * len(blocks)


async def _pause() -> None:
    """Wait for work of the server and the backend that they don't report."""
    await anyio.sleep(_POLL_S)
