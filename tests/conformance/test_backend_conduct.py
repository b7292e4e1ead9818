"""What the suite finds in backends that take care of their bytes, and of nothing else.

Each of these flaws passed the suite once. It names the rule that they break.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.testing import (
    BACKEND_CHECKS,
    NotConforming,
    _stopped_threads,
    _workbench,
    backend_calls,
    check_backend,
)
from kvtier_backends.memory import MemoryBackend
from tests.conformance._flawed_conduct import (
    CLOCK,
    FLAWS,
    BlocksTheLoop,
    CatchesCancellations,
    HasAThread,
    HasNoPlace,
    IsAlwaysBusy,
    KeepsQuietAboutItsThread,
    ListsNothing,
    made,
)
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.backend import BackendContext, LoadBlock, Loaded
    from kvtier.testing import BackendCheck

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("_no_shelves")]


@pytest.fixture
def _threads_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check looks no further after its own limits, and would find no flaw then."""
    monkeypatch.setattr(_stopped_threads, "STOPPED_S_MAX", PATIENCE_S)
    looks = int(PATIENCE_S / _stopped_threads.ALONE_LOOK_S)
    monkeypatch.setattr(_stopped_threads, "ALONE_LOOKS_MAX", looks)


@pytest.mark.usefixtures("_threads_may_be_slow")
@pytest.mark.parametrize("flawed", FLAWS, ids=lambda flawed: flawed.__name__)
async def test_the_check_meant_for_a_flaw_names_the_rule(
    flawed: type[MemoryBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_workbench, "clock", CLOCK)
    check, rule = FLAWS[flawed]
    with pytest.raises(NotConforming, match=rule):
        await check(partial(made, flawed))


@pytest.mark.usefixtures("_threads_may_be_slow")
@pytest.mark.parametrize(
    "flawed",
    [CatchesCancellations, BlocksTheLoop, ListsNothing, HasNoPlace, KeepsQuietAboutItsThread],
)
async def test_the_suite_as_a_whole_names_the_check(
    flawed: type[MemoryBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_workbench, "clock", CLOCK)
    check, rule = FLAWS[flawed]
    with pytest.raises(NotConforming, match=f"{check.__name__}: {rule}"):
        await check_backend(partial(made, flawed))


async def test_a_backend_whose_threads_never_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the slots would never be given back."""
    monkeypatch.setattr(_workbench, "CHECK_TIMEOUT_S_MAX", 0.5)
    with pytest.raises(NotConforming, match="no answer within"):
        await backend_calls.busy_threads_counts_who_may_touch_a_buffer(partial(made, IsAlwaysBusy))


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
async def test_a_backend_with_a_thread_keeps_the_contract(check: BackendCheck) -> None:
    await check(partial(made, HasAThread))


class StallsNowAndThen(MemoryBackend):
    """The machine is busy: one call in three takes long."""

    calls = 0

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        self.calls += 1
        CLOCK.now += 0.3 if self.calls % 3 else 0.0
        return await super().load(blocks)


async def test_a_machine_that_is_busy_is_no_flaw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_workbench, "clock", CLOCK)
    await backend_calls.no_call_blocks_the_event_loop(partial(made, StallsNowAndThen))


class HoldsALockInItsThread(HasAThread):
    """Its thread may be stopped with the lock, and then the loop waits for it."""

    def __init__(self, context: BackendContext, *rest: Any) -> None:
        super().__init__(context, *rest)
        self.guard = threading.Lock()

    def copy(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        with self.guard:
            return super().copy(blocks)

    def busy_threads(self) -> int:
        with self.guard:
            return super().busy_threads()


async def test_a_lock_that_a_thread_shares_with_the_loop_is_no_flaw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_stopped_threads, "STOPPED_S_MAX", 0.05)
    for check in (
        backend_calls.a_cancelled_call_ends,
        backend_calls.busy_threads_counts_who_may_touch_a_buffer,
    ):
        await check(partial(made, HoldsALockInItsThread))
