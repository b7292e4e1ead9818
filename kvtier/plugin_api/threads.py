"""Runs calls that block, and may never return, in threads; and wakes a loop in another thread.

anyio's own worker threads are joined when the process ends, so one hung read
would keep the engine from exiting. These are daemons: a call that hangs costs only its thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import errno
import os
import queue
import threading
import weakref
from collections import deque
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar
from weakref import WeakKeyDictionary

from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_Work = tuple["_Answers", "asyncio.Future[Any]", "Callable[[], Any]"]
_Answer = tuple["asyncio.Future[Any]", Any, "BaseException | None"]

_write_with_gil: Final = ctypes.PyDLL(None).write
_write_with_gil.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_ONE: Final = (1).to_bytes(8, "little")  # for an eventfd; every target is little-endian


def daemon_thread(
    work: Callable[[], object],
    name: str | None = None,
    on_error: Callable[[BaseException], object] | None = None,
) -> threading.Thread:
    """Make a thread, not started yet, that logs what ``work`` raises, and does not outlive Python.

    ``on_error`` is called with the exception, to count it. Python itself would write it to the
    standard error stream, which is rarely read, and the missing work would go unnoticed.
    """

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - a thread has nobody else to hand it to
            thread = threading.current_thread().name
            log.error(
                "unhandled exception in kvtier thread",
                thread=thread,
                error=repr(error),
                exc_info=True,
            )
            if on_error is not None:
                on_error(error)

    return threading.Thread(target=run, name=name, daemon=True)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raises ``OSError`` if the machine, or a limit, allows no more threads."""
    try:
        thread.start()
    except RuntimeError as no_thread:
        raise OSError(errno.EAGAIN, "no thread can be started") from no_thread


class ThreadWaker:
    """Wakes an event loop from another thread, without releasing the GIL.

    ``call_soon_threadsafe`` writes to a socket and releases the GIL for it:
    the woken thread takes the GIL, and may keep it for Python's switch interval
    of 5 ms. Woken this way, it waits until the caller has nothing to do.
    """

    def __init__(self) -> None:
        self.descriptor: Final = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  #: for add_reader
        # Only when it can't be woken any more: the number might be another file's by then. So not
        # at the process's exit, when daemon threads run on: it ends with the process.
        finalizer = weakref.finalize(self, os.close, self.descriptor)
        finalizer.atexit = False

    def wake(self) -> None:
        """Wake the loop that reads the descriptor. Any thread; never waits."""
        _write_with_gil(self.descriptor, _ONE, len(_ONE))

    def clear(self) -> None:
        """Note that the loop is awake. Loop thread only."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)


class _Answers:
    """Results of calls, on their way from any thread to one event loop.

    One wake-up serves all calls that end before the loop looks.
    """

    @classmethod
    def to(cls, loop: asyncio.AbstractEventLoop) -> _Answers:
        """Return this loop's instance."""
        answers = _answers.get(loop)
        if answers is None:
            answers = _answers[loop] = cls(loop)
        return answers

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._waiting: deque[_Answer] = deque()
        self._waker = ThreadWaker()
        self._is_woken = False
        loop.add_reader(self._waker.descriptor, self._hand_over)

    def post(self, answer: _Answer) -> None:
        """Have a future settled. Any thread; if the loop is closed, the answer is dropped."""
        self._waiting.append(answer)
        if not self._is_woken:
            self._is_woken = True
            self._waker.wake()

    def _hand_over(self) -> None:
        # In this order: an answer that comes in between is either taken now or wakes again.
        self._waker.clear()
        self._is_woken = False
        waiting = self._waiting
        while waiting:
            future, result, error = waiting.popleft()
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            elif isinstance(error, StopIteration):  # no future takes it, and others wait behind
                future.set_exception(RuntimeError("the call raised StopIteration"))
            else:
                future.set_exception(error)


_answers: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, _Answers]] = WeakKeyDictionary()


class BoundedCall(Generic[T]):
    """One call, in a daemon thread of its own: a caller may stop waiting for it.

    The caller's context variables apply in it. Any thread may wait.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        """Begin the call. Raises ``OSError`` if no thread can be started."""
        self._ended = threading.Event()
        self._result: T
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        start_thread(daemon_thread(partial(self._run, partial(context.run, call)), name))

    def wait(self, timeout_s: float) -> bool:
        """Wait until the call is over, or the time. False: it still runs, perhaps for ever."""
        return self._ended.wait(timeout_s)

    def result(self) -> T:
        """Return the call's result, or raise its exception. Waits for it, if need be."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._result = call()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self._error = error
        self._ended.set()


class DaemonThreads:
    """A fixed number of daemon threads that run blocking calls for an event loop.

    Threads start with the first call. ``run`` may be cancelled: the caller continues;
    a call that runs by then runs to its end, and its result is dropped.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unended: set[asyncio.Future[Any]] = set()

    async def run(self, call: Callable[[], T]) -> T:
        """Run ``call()`` in one of the threads and return its result or raise its exception.

        Raises ``OSError`` if there is no thread, and none can be started.
        """
        if len(self._threads) < self._count:
            self._start_one()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._unended.add(future)
        self._queue.put((_Answers.to(loop), future, call))
        return await future

    def stop(self) -> None:
        """Let each thread end after its current call. Never waits."""
        for _ in self._threads:
            self._queue.put(None)

    def busy(self) -> int:
        """Return how many calls run or wait, hung and cancelled ones included. Any thread."""
        return len(self._unended)

    def _start_one(self) -> None:
        thread = daemon_thread(self._work, f"{self._name}-{len(self._threads)}")
        try:
            start_thread(thread)
        except OSError:
            if self._threads:
                return  # the others do the work, and the next call tries again
            raise
        self._threads.append(thread)

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            answers, future, call = work
            if future.cancelled():
                self._unended.discard(future)
                continue
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:  # noqa: BLE001 - handed to the caller, not swallowed
                error = raised
            # Before the report: its receiver may count on the call being over.
            self._unended.discard(future)
            answers.post((future, result, error))
            # An idle thread keeps no reference: not to a buffer, nor to a loop that is gone.
            del work, answers, future, call, result, error
