"""Starts processes that end with the engine's process, in whatever state they are.

A tier's process watches the engine's and ends with it. A stopped process can't watch anything, so
the kernel is asked to kill it (``PR_SET_PDEATHSIG``). For the kernel the parent is a thread: it
sends the signal when the thread that started the process ends, even if other threads of its process
continue. So one thread starts them all, and ends only with its process.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import threading
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from kvtier.plugin_api.threads import daemon_thread, start_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    _Started: TypeAlias = "Future[subprocess.Popen[bytes]]"
    _Order: TypeAlias = tuple[_Started, Sequence[str], Sequence[int]]

THREAD_NAME: Final = "kvtier-spawner"
"""Name of the thread that starts all processes. It lives as long as this process."""

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_PR_SET_NAME: Final = 15


def spawn(arguments: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a program with a pipe as its stdin, and these descriptors under their numbers.

    Any thread may call it. Raises ``OSError`` if the program can't be started.
    The program calls ``end_with_parent`` as soon as it can.
    """
    started: _Started = Future()
    _orders_of_this_process().put((started, arguments, descriptors))
    try:
        return started.result()
    except BaseException:  # an interrupted caller never gets a process that starts after that
        started.add_done_callback(_kill)
        raise


def end_with_parent(parent_pid: int) -> None:
    """Have the calling process killed when the one that spawned it ends; end if it has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it ended before that
        os._exit(1)


def show_as(name: str) -> None:
    """Show the calling process as ``name`` in ``ps`` and ``top``: its first 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode("utf-8", "replace"), 0, 0, 0)


def let_waker_go_on() -> None:
    """Have the calling process, when it is woken, not take the processor from its waker.

    On a busy machine, the scheduler's thread would else stand still for a message that it has sent
    until this process sleeps again: for a millisecond in some steps, on two cores. Where a
    processor is free, nothing changes.
    """
    with suppress(OSError):  # a sandbox may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # whoever chose another knows why
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _kill(started: _Started) -> None:
    if started.exception() is None:
        process = started.result()
        process.kill()
        process.wait()


_orders: queue.SimpleQueue[_Order] | None = None
_starting = threading.Lock()


def _orders_of_this_process() -> queue.SimpleQueue[_Order]:
    global _orders  # noqa: PLW0603 - one thread for the whole process
    with _starting:
        if _orders is None:
            orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
            start_thread(daemon_thread(partial(_carry_out, orders), THREAD_NAME))
            _orders = orders  # if none can be started, the next call tries again
        return _orders


def _carry_out(orders: queue.SimpleQueue[_Order]) -> None:
    while True:
        started, arguments, descriptors = orders.get()
        try:
            process = subprocess.Popen(  # noqa: S603 - our own program
                arguments, stdin=subprocess.PIPE, pass_fds=descriptors
            )
        except BaseException as error:  # noqa: BLE001 - handed to the caller, not swallowed
            started.set_exception(error)
        else:
            started.set_result(process)
            del process
        del started, arguments, descriptors  # an idle thread keeps no reference


def _restart_in_a_fork() -> None:
    global _orders, _starting
    _orders, _starting = None, threading.Lock()  # the thread is the parent's


os.register_at_fork(after_in_child=_restart_in_a_fork)
