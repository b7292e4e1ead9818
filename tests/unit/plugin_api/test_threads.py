"""Blocking calls in threads: each caller gets its own answer, whatever ends together."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest
from structlog.testing import capture_logs

from kvtier.plugin_api.threads import BoundedCall, DaemonThreads, daemon_thread
from tests.support.no_threads import no_threads
from tests.support.patience import PATIENCE_S, until

pytestmark = pytest.mark.anyio

AT_EXIT = """
import atexit, os
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.plugin_api.threads import ThreadWaker

descriptors = []
atexit.register(lambda: print(*map(os.fstat, descriptors)))  # runs after what is registered later
waker, memory = ThreadWaker(), SlotMemory.anonymous(1, 4096)
descriptors += [waker.descriptor, memory.descriptor]
"""


def test_what_daemon_threads_use_stays_open_at_the_process_s_exit() -> None:
    """They run on there, and the numbers might be another file's."""
    run = subprocess.run(
        [sys.executable, "-c", AT_EXIT],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.stdout.count("os.stat_result") == 2, run.stderr


async def test_each_caller_gets_what_its_call_returned_or_raised() -> None:
    threads = DaemonThreads(4, "test")

    def work(number: int) -> int:
        if number % 3 == 0:
            raise ValueError(number)
        return number

    calls = [threads.run(lambda number=number: work(number)) for number in range(500)]
    for number, answer in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
        if number % 3 == 0:
            assert isinstance(answer, ValueError)
            assert answer.args == (number,)
        else:
            assert answer == number
    assert threads.busy() == 0
    threads.stop()


async def test_a_cancelled_call_goes_on_and_its_answer_harms_nobody() -> None:
    threads = DaemonThreads(1, "test")
    begun, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang() -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait()

    hung = asyncio.create_task(threads.run(hang))
    await begun.wait()
    hung.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hung
    assert threads.busy() == 1
    go_on.set()
    assert await threads.run(lambda: 7) == 7
    assert threads.busy() == 0
    threads.stop()


def test_an_answer_for_a_loop_that_is_closed_is_dropped_and_the_threads_serve_the_next() -> None:
    threads = DaemonThreads(1, "test")
    go_on = threading.Event()

    async def leave_one_behind() -> None:
        task = asyncio.create_task(threads.run(go_on.wait))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave_one_behind())
    go_on.set()

    async def ask() -> int:
        return await threads.run(lambda: 7)

    assert asyncio.run(ask()) == 7
    threads.stop()


def test_idle_threads_keep_no_loop_and_no_result_alive() -> None:
    class Result:
        pass

    threads = DaemonThreads(1, "test")

    async def ask() -> tuple[weakref.ref[Result], weakref.ref[asyncio.AbstractEventLoop]]:
        result = await threads.run(Result)
        return weakref.ref(result), weakref.ref(asyncio.get_running_loop())

    result, loop = asyncio.run(ask())

    def are_gone() -> bool:
        gc.collect()
        return result() is None and loop() is None

    until(are_gone)  # the thread has answered, and may not be idle yet
    threads.stop()


async def test_a_thread_that_cannot_be_started_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = DaemonThreads(2, "test")

    with no_threads(monkeypatch):
        for _ in range(3):
            with pytest.raises(OSError, match="no thread can be started"):
                await threads.run(lambda: 7)
        with pytest.raises(OSError, match="no thread can be started"):
            BoundedCall(lambda: 7, "test")
        assert threads.busy() == 0
    assert await threads.run(lambda: 7) == 7
    with no_threads(monkeypatch):
        assert await threads.run(lambda: 8) == 8, "the one that runs does it"
    assert await threads.run(lambda: 9) == 9
    assert len(threads._threads) == 2
    threads.stop()


def test_what_a_thread_raises_is_logged_and_told_and_not_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    told: list[BaseException] = []

    def fail() -> None:
        raise KeyError("k")

    with capture_logs() as lines:
        thread = daemon_thread(fail, "1:fs-look", told.append)
        thread.start()
        thread.join(PATIENCE_S)
    assert [repr(error) for error in told] == ["KeyError('k')"]
    (line,) = lines
    assert (line["thread"], line["error"], line["exc_info"]) == (
        "1:fs-look",
        "KeyError('k')",
        True,
    )
    assert capfd.readouterr().err == ""
