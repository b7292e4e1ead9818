"""Wakes an idle engine every few seconds, so that tier events, metrics and logs are published.

With no request left, vLLM's engine waits for the next one: events, gauges and log lines about a
tier's losses or faults meanwhile would be published only then. vLLM has a message that only wakes
its loop. The loop then checks whether the connector has anything to step for
(``KVTierManager.has_pending_work``), and goes back to waiting if it has not.

Only an engine in a process of its own has such a loop. An engine that runs inside its caller's
program steps only when the program calls it.
"""

from __future__ import annotations

import threading
import time
from functools import wraps
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc

from kvtier.plugin_api.threads import daemon_thread
from kvtier.vllm.workarounds.ending import ENDING
from kvtier.vllm.workarounds.hooking import once_a_process

if TYPE_CHECKING:
    from collections.abc import Callable

WAKE_S: Final = 2.0
"""Interval between two checks of its tiers by an idle engine."""

_MESSAGE: Final = (EngineCoreRequestType.WAKEUP, None)


class IdleWaker:
    """Wakes one engine while it waits for requests."""

    def __init__(self, engine: EngineCoreProc) -> None:
        self._queue = engine.input_queue
        self._waits = threading.Event()
        daemon_thread(self._run, "kvtier-idle").start()

    def on_wait(self) -> None:
        """Note that the engine may be waiting now."""
        self._waits.set()

    def on_work(self) -> None:
        """Note that it is not waiting any more."""
        self._waits.clear()

    def _run(self) -> None:
        while self._waits.wait():
            time.sleep(WAKE_S)
            if self._waits.is_set() and self._queue.empty():
                self._queue.put_nowait(_MESSAGE)


@once_a_process
def wake_idle_engines() -> None:
    """Wake each engine of this process while it waits. Once a process."""
    EngineCoreProc.has_work = _woken(EngineCoreProc.has_work)


def _woken(real: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wrap vLLM's check for work, to note its result: without work the loop waits for a message."""
    wakers: WeakKeyDictionary[Any, IdleWaker] = WeakKeyDictionary()

    @wraps(real)
    def has_work(engine: Any) -> bool:  # noqa: ANN401 - vLLM has no stubs
        waker = wakers.get(engine)
        if waker is None:
            waker = wakers[engine] = IdleWaker(engine)
        ENDING.look(engine)
        found = real(engine)
        if found:
            waker.on_work()
        else:
            waker.on_wait()
        return found

    return has_work
