"""The parts of the s3 backend that need no server: turns, attempts, buffers, panics."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from kvtier.plugin_api.deadlines import time_limit
from kvtier_backends.s3.attempts import ATTEMPTS_MAX, Attempts, backoff_s
from kvtier_backends.s3.client import _call
from kvtier_backends.s3.failures import Failure, RequestFailed, failure_of
from kvtier_backends.s3.library_threads import LentBuffers
from kvtier_backends.s3.request_limiter import RequestLimiter, Urgency

pytestmark = pytest.mark.anyio


async def pass_loop() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_most_urgent_has_the_next_turn() -> None:
    limiter, order = RequestLimiter(1), []

    async def take(urgency: Urgency) -> None:
        async with limiter.turn(urgency):
            order.append(urgency)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for urgency in (Urgency.STORE, Urgency.STORE, Urgency.LOAD, Urgency.PROBE):
            group.create_task(take(urgency))
    assert order == [Urgency.STORE, Urgency.PROBE, Urgency.LOAD, Urgency.STORE]


async def test_no_turn_is_lost_when_those_who_wait_are_cancelled() -> None:
    limiter = RequestLimiter(2)
    gate = asyncio.Event()

    async def take() -> None:
        async with limiter.turn(Urgency.LOAD):
            await gate.wait()

    for ends_as_granted in (False, True):
        gate.clear()
        running = [asyncio.create_task(take()) for _ in range(2)]
        waiting = [asyncio.create_task(take()) for _ in range(4)]
        await pass_loop()
        if ends_as_granted:
            gate.set()
            await asyncio.sleep(0)  # those who run end, and two of those who wait are granted
        for task in waiting:
            task.cancel()
        gate.set()
        await asyncio.wait([*running, *waiting])
        for _ in range(2):  # both turns are there again
            async with asyncio.timeout(0), limiter.turn(Urgency.STORE):
                pass


async def test_the_limit_is_halved_once_a_round_and_grows_by_one_a_round() -> None:
    limiter = RequestLimiter(16)
    async with limiter.turn(Urgency.LOAD) as first, limiter.turn(Urgency.LOAD) as second:
        limiter.slow_down(first)
        limiter.slow_down(second)
    assert limiter.limit == 8
    for _ in range(9):
        limiter.on_success()
    assert limiter.limit == 9
    for _ in range(1000):
        limiter.on_success()
    assert limiter.limit == 16
    for _ in range(10):
        async with limiter.turn(Urgency.LOAD) as turn:
            limiter.slow_down(turn)
    assert limiter.limit == 1


def test_pauses_grow_have_jitter_and_are_bounded() -> None:
    drawn = [[backoff_s(attempt) for _ in range(200)] for attempt in range(40)]
    assert all(0 <= pause <= 0.05 * 2**attempt for attempt in range(5) for pause in drawn[attempt])
    assert max(drawn[39]) <= 2.0
    assert max(drawn[3]) > max(drawn[0])
    assert len(set(drawn[10])) > 100


async def test_a_request_without_a_deadline_ends_after_some_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtier_backends.s3.attempts.backoff_s", lambda _attempt: 0.0)
    noted: list[RequestFailed] = []
    attempts = Attempts(RequestLimiter(1), 3600.0, lambda failed, _: noted.append(failed))

    async def fails() -> None:
        raise RequestFailed(Failure.BROKEN, "500")

    with pytest.raises(RequestFailed, match="500"):
        await attempts.run(Urgency.STORE, fails)
    assert len(noted) == ATTEMPTS_MAX


async def test_nothing_is_sent_for_what_nobody_waits_for() -> None:
    attempts = Attempts(RequestLimiter(1), 10.0, lambda _failed, _urgency: None)

    async def hangs() -> None:
        await asyncio.Event().wait()

    with time_limit(0.0), pytest.raises(RequestFailed, match="no answer in time"):
        await attempts.run(Urgency.LOAD, hangs)


def test_a_buffer_counts_until_all_others_have_let_go_of_it() -> None:
    lent = LentBuffers()
    slot = memoryview(bytearray(64))
    free, held = lent.lend(slot), lent.lend(slot)
    reader = pickle.PickleBuffer(held)
    lent.give_back(free)
    lent.give_back(held)
    assert lent.count() == 1
    del reader
    assert lent.count() == 0


async def test_a_panic_of_the_native_library_is_a_failed_request() -> None:
    """Its text and its kind are nobody's to know, and it must not end the tier."""
    import obstore
    from obstore.store import MemoryStore

    store = MemoryStore()
    await obstore.put_async(store, "name", b"abc")
    with pytest.raises(BaseException) as raised:  # noqa: PT011 - of any kind
        await obstore.get_ranges_async(store, "name", starts=[0, 100], ends=[3, 200])
    assert type(raised.value).__name__ == "RustPanic"
    with pytest.raises(RequestFailed, match="no answer"):
        await _call(lambda: obstore.get_ranges_async(store, "name", starts=[0, 100], ends=[3, 200]))


def test_a_failure_shows_status_and_code_and_nothing_else_of_the_librarys_text() -> None:
    text = (
        "Generic error: GET https://host/b?sig=SECRET - Server returned non-2xx status code: "
        "503 Service Unavailable: <Error><Code>SlowDown</Code><Message>SECRET</Message></Error>"
    )
    failed = failure_of(RuntimeError(text))
    assert (failed.failure, str(failed)) == (Failure.BUSY, "503 SlowDown")
    refused = failure_of(
        RuntimeError("GET https://host/b?sig=SECRET: Os { kind: ConnectionRefused")
    )
    assert str(refused) == "no answer (connection refused)"
    unanswered = failure_of(RuntimeError("GET https://host/b?sig=SECRET: connection refused"))
    assert unanswered.failure is Failure.UNREACHABLE
    assert "SECRET" not in str(unanswered)
