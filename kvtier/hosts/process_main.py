"""Runs in a tier's own process: one life of its cell.

The engine's side is ``kvtier/hosts/process_host.py``. The process makes the backend,
reports that, and waits for ``Begin``. It ends when told to, when its cell breaks, or when the
engine's process is gone. It never outlives that, and never restarts: its engine starts another
process instead. So a broken cell takes with it everything that might still touch a slot.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import anyio

from kvtier.core import wire
from kvtier.errors import ConfigError, KVTierError, StorageUnusable
from kvtier.hosts.channel import (
    Begin,
    Channel,
    End,
    Logged,
    Opened,
    Ready,
    Refused,
    SendCount,
    Setup,
    ToTier,
)
from kvtier.hosts.process_log import send_log_to
from kvtier.hosts.spawning import end_with_parent, let_waker_go_on, show_as
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings.plugins import fallback_policy, make_backend, policy_maker
from kvtier.tier.cell import TierCell, reason_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kvtier.core.wire import Message
    from kvtier.hosts.channel import Fields, Level
    from kvtier.plugin_api.backend import Backend

LAST_WORDS_S: Final = 1.0

SWITCH_INTERVAL_S: Final = 1e-4
"""How long the event loop may keep the GIL from I/O threads that have a call to make.

Python's own 5 ms are longer than a disk takes for one call, so the disk would be idle.
"""


class Outbox:
    """The link's mailbox, as the tier's actors see it. Loop thread only, except ``say``."""

    def __init__(self, channel: Channel[Any]) -> None:
        self._channel = channel
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_flushing = False  # a flush is scheduled

    @contextmanager
    def on_this_loop(self) -> Iterator[None]:
        """Send by this loop for a while. Before and after, messages wait for ``close``."""
        self._loop = asyncio.get_running_loop()
        try:
            yield
        finally:
            self._loop = None

    def post(self, message: Message) -> bool:
        """Take a message for the link. Never full."""
        self._channel.post(message)
        if not self._is_flushing and self._loop is not None:
            self._is_flushing = True
            self._loop.call_soon(self._send)
        return True

    def say_opened(self, gauges: Mapping[str, int]) -> None:
        """Report that the backend is open, with its gauges."""
        self.post(Opened(gauges=dict(gauges)))

    def say(self, level: Level, event: str, fields: Fields) -> None:
        """Send a line of the log. Any thread."""
        line = Logged(level=level, event=event, fields=fields)
        loop = self._loop
        if loop is None or threading.current_thread() is threading.main_thread():
            self.post(line)
        else:
            with suppress(RuntimeError):  # the loop has ended by now
                loop.call_soon_threadsafe(self.post, line)

    def close(self) -> None:
        """Send the remaining messages, waiting a moment if need be. The loop is over."""
        deadline_s = time.monotonic() + LAST_WORDS_S
        while not self._channel.flush() and time.monotonic() < deadline_s:
            time.sleep(0.001)

    def _send(self) -> None:
        if self._loop is None:
            return
        if self._channel.flush():
            self._is_flushing = False
            self._loop.remove_writer(self._channel)
        else:  # the engine does not poll for now; it does so once a step
            self._loop.add_writer(self._channel, self._send)


class Inbox:
    """The cell's waker: takes in the engine's messages."""

    def __init__(self, channel: Channel[Any], cell: TierCell) -> None:
        self.cell = cell
        self.is_ending = False
        self._channel = channel

    @property
    def descriptor(self) -> int:
        """The socket."""
        return self._channel.fileno()

    def clear(self) -> None:
        """Pass new messages to the cell."""
        self.hand_in(self._channel.drain())
        if self._channel.is_ended:
            # There is no engine left to serve, and the next one may want the tier's place.
            os._exit(1)

    def hand_in(self, messages: Iterable[Message]) -> None:
        """Pass these messages to the cell."""
        for message in messages:
            if isinstance(message, End):
                self.is_ending = True
            else:
                self.cell.post(message)


def main(
    parent_pid: int, channel_descriptor: int, memory_descriptor: int, sent_descriptor: int
) -> None:
    """Serve one tier until the process is to end. Called by the program that the engine starts."""
    end_with_parent(parent_pid)
    show_as(sys.argv[1])
    let_waker_go_on()
    for number in (signal.SIGINT, signal.SIGTERM):
        # They are sent to whole process groups: the engine gets them too, and decides.
        signal.signal(number, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # a disk tier holds some per gigabyte
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    end = socket.socket(fileno=channel_descriptor)
    end.set_inheritable(False)  # else a process that the backend starts could keep it open
    channel: Channel[Any] = Channel(end, ToTier, counted=SendCount(sent_descriptor))
    os.close(sent_descriptor)
    setup: Setup = pickle.loads(sys.stdin.buffer.read())  # noqa: S301 - the engine's own process wrote it
    memory = SlotMemory.of_descriptor(
        memory_descriptor, setup.slot_count, setup.context.block_bytes, setup.rests
    )
    outbox = Outbox(channel)
    send_log_to(outbox.say)
    try:
        backend = make_backend(setup.tier, setup.context)
    except Exception as error:  # noqa: BLE001 - whatever it is, the engine's side raises it
        reason = str(error) if isinstance(error, KVTierError) else reason_of(error)
        is_setting = isinstance(error, ConfigError)
        is_trouble = isinstance(error, StorageUnusable)
        _answer(channel, Refused(reason=reason, is_setting=is_setting, is_trouble=is_trouble))
        return
    _answer(channel, _ready(backend))
    first, *others = _next(channel)
    if isinstance(first, Begin):
        cell = TierCell(
            setup.tier.name,
            backend,
            memory,
            outbox,
            policy_maker(setup.tier, backend.traits),
            fallback_policy(),
            may_announce=lambda: channel.is_flushed,
            beside_scheduler=False,
        )
        inbox = Inbox(channel, cell)
        inbox.hand_in(others)
        # Imported objects stay: a collection that walked them would hold up a load by 15 ms.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            anyio.run(partial(_live, inbox, outbox, setup.context.engine_pid))
        except BaseException as error:  # noqa: BLE001 - a bug in a tier ends its process, no other
            outbox.post(wire.TierBroke(reason=reason_of(error)))
    outbox.close()
    # Do not wait for a call that hangs in a thread.
    os._exit(0)


async def _live(inbox: Inbox, outbox: Outbox, engine_pid: int) -> None:
    _end_with(engine_pid)
    with outbox.on_this_loop():
        await inbox.cell.live(
            inbox,
            opened=outbox.say_opened,
            is_ending=lambda: inbox.is_ending,
            is_abandoned=lambda: False,
        )


def _end_with(engine_pid: int) -> None:
    """End when that process does, even if a process forked from it holds the channel open.

    The kernel then kills this one (``end_with_parent``), unless that isn't allowed here.
    """
    try:
        engine = os.pidfd_open(engine_pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # not allowed here: the channel's end shows it in all other cases
        return
    asyncio.get_running_loop().add_reader(engine, os._exit, 1)


def _ready(backend: Backend) -> Ready:
    return Ready(traits=backend.traits, place=backend.place, filesystem=backend.filesystem)


def _answer(channel: Channel[Any], message: Message) -> None:
    channel.post(message)
    channel.flush()


def _next(channel: Channel[Message]) -> list[Message]:
    """Wait for the engine's next messages. Return ``End`` if the engine is gone."""
    while True:
        channel.wait(None)
        messages = channel.drain()
        if messages:
            return messages
        if channel.is_ended:
            return [End()]
