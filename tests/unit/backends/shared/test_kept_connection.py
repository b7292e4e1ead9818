"""A connection is made, checked, lost and made again; what went wrong is logged once an episode."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import Connection
from kvtier_backends.incidents import TierCounters
from kvtier_backends.shared import kept_connection
from kvtier_backends.shared.kept_connection import (
    PAUSE_S_MAX,
    PAUSE_S_MIN,
    REASONS_MAX,
    STEADY_S,
    KeptConnection,
)
from tests.support.patience import until_true

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, MutableMapping

pytestmark = pytest.mark.anyio

CONNECTING, UP, GONE = Connection.CONNECTING, Connection.UP, Connection.GONE
REFUSED = StoreFault("connection refused")
WARNING = "toy tier: not connected, and not used until it is"


class Toy(KeptConnection):
    """A connection to nothing: a test says what each attempt finds, and moves the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counters = TierCounters()
        super().__init__("toy", "1:toy", "toy://here", self.counters)
        self.states: list[Connection] = []
        self.finds: deque[Exception | None] = deque()  #: what attempts find; then they go well
        self.attempts: list[str] = []
        self.pauses_s: list[float] = []
        self.times_released = 0
        self.now_s = 0.0
        monkeypatch.setattr(kept_connection, "clock", lambda: self.now_s)
        monkeypatch.setattr(kept_connection, "sleep", self._sleep)

    @property
    def backoff_s(self) -> list[float]:
        """The pauses after attempts that failed, without what a good one is followed by."""
        return [pause_s for pause_s in self.pauses_s if pause_s != PAUSE_S_MIN]

    async def lost(self, *finds: Exception) -> None:
        """Find these, beginning with a doubt, and be up again."""
        times_up = self.states.count(UP)
        self.finds += finds
        self.doubt()
        await until_true(lambda: self.states.count(UP) > times_up, lambda: self.attempts)

    async def _connect(self) -> None:
        self._find("connect")

    async def _check(self) -> None:
        self._find("check")

    def _find(self, attempt: str) -> None:
        self.attempts.append(attempt)
        found = self.finds.popleft() if self.finds else None
        if found is not None:
            raise found

    def _release(self) -> None:
        self.times_released += 1

    async def _sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        await asyncio.sleep(0)


@asynccontextmanager
async def started(toy: Toy) -> AsyncIterator[list[MutableMapping[str, Any]]]:
    """Give the log's lines, while the connection is kept."""
    with capture_logs() as lines:
        toy.start(toy.states.append)
        try:
            yield lines
        finally:
            await toy.stop()


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    return Toy(monkeypatch)


async def test_it_counts_as_connecting_until_it_is_up_and_is_gone_only_after_that(toy: Toy) -> None:
    toy.finds += [REFUSED, REFUSED]
    async with started(toy):
        await until_true(lambda: UP in toy.states)
        await toy.lost(REFUSED, REFUSED)
    assert toy.states == [CONNECTING, UP, GONE, UP]
    assert toy.attempts == ["connect"] * 3 + ["check"] + ["connect"] * 2
    assert toy.counters.counts() == {"connects_failed": 4, "connection_gone": 1}


async def test_a_doubt_that_turns_out_wrong_changes_nothing(toy: Toy) -> None:
    async with started(toy) as lines:
        await until_true(lambda: UP in toy.states)
        toy.doubt()
        await until_true(lambda: toy.attempts == ["connect", "check"])
    assert toy.states == [CONNECTING, UP]
    assert lines == []
    assert toy.counters.counts() == {}


async def test_what_is_lost_for_certain_is_not_checked_first(toy: Toy) -> None:
    async with started(toy) as lines:
        await until_true(lambda: UP in toy.states)
        toy.lose(StoreFault("403"))
        await until_true(lambda: toy.states == [CONNECTING, UP, GONE, UP])
    assert toy.attempts == ["connect", "connect"]
    assert lines[0]["reason"] == "403"


async def test_what_a_call_met_before_it_was_up_says_nothing_of_the_new_connection(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call may end long after the connection that it went over."""

    async def connect() -> None:
        toy.lose(REFUSED)

    monkeypatch.setattr(toy, "_connect", connect)
    async with started(toy):
        await until_true(lambda: UP in toy.states)
        toy.doubt()
        await until_true(lambda: toy.attempts == ["check"])
    assert toy.states == [CONNECTING, UP]


async def test_it_is_checked_every_so_often(toy: Toy) -> None:
    toy._check_every_s = 0.001
    async with started(toy):
        await until_true(lambda: toy.attempts.count("check") > 2)
        toy.finds.append(REFUSED)
        await until_true(lambda: GONE in toy.states)


async def test_pauses_double_up_to_the_longest_and_each_is_drawn(toy: Toy) -> None:
    """From the upper half: so engines spread out, and none of them tries at once."""
    toy.finds += [REFUSED] * 40
    async with started(toy):
        await until_true(lambda: UP in toy.states)
    bounds = [min(PAUSE_S_MIN * 2**number, PAUSE_S_MAX) for number in range(40)]
    assert len(toy.backoff_s) == 40
    assert all(
        bound / 2 <= pause_s < bound for pause_s, bound in zip(toy.backoff_s, bounds, strict=True)
    )
    assert len({*toy.backoff_s}) == 40


@pytest.mark.parametrize("is_steady", [False, True])
async def test_pauses_begin_anew_and_reasons_are_logged_again_once_it_was_up_for_a_while(
    toy: Toy, *, is_steady: bool
) -> None:
    async with started(toy) as lines:
        await until_true(lambda: UP in toy.states)
        await toy.lost(*[REFUSED] * 10)
        toy.now_s += STEADY_S if is_steady else STEADY_S - 1
        await toy.lost(REFUSED)
    assert (toy.backoff_s[-1] < PAUSE_S_MIN) is is_steady
    events = [line["event"] for line in lines]
    assert events == [WARNING, "toy tier: connected"] * (2 if is_steady else 1)
    assert all("seconds" in line for line in lines[1::2]), "how long it was away"


async def test_each_reason_is_logged_with_the_tier_and_its_place(toy: Toy) -> None:
    toy.finds += [REFUSED, StoreFault("404"), REFUSED, StoreFault("404")]
    async with started(toy) as lines:
        await until_true(lambda: UP in toy.states)
    warnings = [line for line in lines if line["event"] == WARNING]
    assert [line["reason"] for line in warnings] == ["connection refused", "404"]
    assert {(line["tier"], line["place"]) for line in lines} == {("1:toy", "toy://here")}
    assert "by itself" in warnings[0]["remedy"]


async def test_reasons_that_are_new_each_time_do_not_fill_the_log(toy: Toy) -> None:
    toy.finds += [StoreFault(f"at {number}") for number in range(100)]
    async with started(toy) as lines:
        await until_true(lambda: UP in toy.states)
    assert len(lines) == REASONS_MAX + 1


async def test_a_defect_is_a_reason_too_and_its_text_stays_out_of_the_log(toy: Toy) -> None:
    toy.finds.append(ValueError("a secret"))
    async with started(toy) as lines:
        await until_true(lambda: UP in toy.states)
    assert lines[0]["reason"] == "unexpected ValueError"
    assert "secret" not in str(lines)


async def test_what_a_connection_held_is_let_go_after_each_failure_and_at_the_end(
    toy: Toy,
) -> None:
    toy.finds += [REFUSED, REFUSED]
    async with started(toy):
        await until_true(lambda: UP in toy.states)
        assert toy.times_released == 2
    assert toy.times_released == 3
    await toy.stop()


async def test_stopping_ends_a_pause_and_an_attempt(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_seconds: float = 0.0) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(toy, "_connect", hang)
    async with started(toy):
        await asyncio.sleep(0)
    monkeypatch.undo()
    other = Toy(monkeypatch)
    monkeypatch.setattr(kept_connection, "sleep", hang)
    other.finds.append(REFUSED)
    async with started(other):
        await until_true(lambda: other.attempts)
    assert (toy.states, other.states) == ([CONNECTING], [CONNECTING])
