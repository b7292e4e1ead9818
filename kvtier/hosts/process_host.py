"""Hosts a tier's cell in a process of its own, which maps the slots too.

The scheduler's process then shares no interpreter lock with the tier, whose
threads can't keep it from its work; a tier that crashes, or eats all memory,
takes down only itself. The other end is ``kvtier/hosts/process_main.py``.

The process is the fence: when it ends, whatever the reason, nothing of the
tier can touch a slot any more. Another one is started after a pause, and
claims the tier's place again.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kvtier.core import wire
from kvtier.core.tier_host import TierHost
from kvtier.errors import ConfigError, InternalError, StorageUnusable, StoreFault
from kvtier.hosts.channel import (
    Begin,
    Channel,
    End,
    Logged,
    NoMessage,
    Opened,
    Ready,
    Refused,
    SendCount,
    Setup,
    ToEngine,
)
from kvtier.hosts.life import Life, LifeEvent, LifeState
from kvtier.hosts.restarts import (
    RESTART_PAUSE_S,
    RESTART_PAUSE_S_MAX,
    WAIT_FRACTION,
    RestartPause,
)
from kvtier.hosts.spawning import spawn
from kvtier.hosts.starting import Opening, hangs
from kvtier.plugin_api.log import log
from kvtier.plugin_api.run_delays import RunDelays
from kvtier.plugin_api.threads import BoundedCall, daemon_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.core.actor import Mailbox
    from kvtier.core.wire import Message
    from kvtier.plugin_api.backend import BackendContext, BackendTraits
    from kvtier.plugin_api.slot_memory import SlotMemory
    from kvtier.settings.runtime_config import TierConfig

OPEN_TIMEOUT_S: Final = 600.0
KILL_S: Final = 0.5
"""Time after which a killed process that still exists is in an uninterruptible call."""

LOOK_S: Final = 0.25
"""Time without a reply after which the kernel is queried for run delays, and the interval.

The scheduler's thread queries it, which takes a while for each thread (``RunDelays``), so it skips
processes that respond.
"""

OUT_OF_MEMORY: Final = (
    ", as the kernel does when memory runs out. A container's memory limit has to cover "
    "cpu_bytes_to_use and the tiers' processes, in addition to vLLM's own memory"
)
"""Usual meaning of a SIGKILL in a container; only the kernel's own log has the reason."""

_CLOSE_POLL_S: Final = 0.01
_START_POLL_S: Final = 0.1

OWED_FOR: Final = (wire.Probe, wire.LoadJob, wire.StoreJob)
"""The messages to which a tier replies, once each."""

_PROGRAM: Final = (
    "import sys; sys.path[:] = sys.argv[6:]; "
    "from kvtier.hosts.process_main import main; main(*map(int, sys.argv[2:6]))"
)


class Silence:
    """A period in which a process owes a reply, and sends none."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._delays: RunDelays | None = None

    def not_run_s(self, process: int) -> float:
        """Return how long the machine did not run the process, as far as not reported yet."""
        if self._delays is None:
            if time.monotonic() - self._since_s < LOOK_S:
                return 0.0
            self._delays = RunDelays(process, every_s=LOOK_S)
        return self._delays.look()


class TierProcess(TierHost):
    """Runs one tier's cell in a process, and starts another one when it is gone.

    ``make`` it first. ``close`` it, also if it was not started.
    """

    def __init__(
        self,
        tier: TierConfig,
        context: BackendContext,
        memory: SlotMemory,
        link: Mailbox,
        *,
        messages_max: int,
    ) -> None:
        self.name = tier.name
        self._unusable_for: str | None = None
        self._opening = Opening(tier.name, "process", link)
        self._tier = tier
        self._context = context
        self._memory = memory
        self._link = link
        self._messages_max = messages_max
        self._life = Life(has_backend=True)
        # The scheduler and the watcher use the channel alternately; neither keeps it for long.
        self._using = threading.Lock()
        self._owed = 0  # answers
        self._silence = Silence()  # since the last answer, or since one is owed
        self._child: _Child | None = None  # the last one whose backend was made
        self._channel: Channel[Any] | None = None  # of the child that runs
        self._stuck: subprocess.Popen[bytes] | None = None  # killed, and not gone yet
        self._pause = RestartPause(RESTART_PAUSE_S, RESTART_PAUSE_S_MAX)
        self._watcher = daemon_thread(
            self._watch,
            f"kvtier-{tier.name}-watch",
            on_error=lambda error: self._say_broke(f"its watcher raised {error!r}"),
        )

    def make(self) -> None:
        """Start the first process, and wait until its backend is made.

        Raises ``ConfigError`` for a bad setting; ``StorageUnusable`` also if that
        takes longer than ``start_timeout_s``. Then nothing runs, as far as known.
        """
        self._child = self._new_child()
        self._channel = self._child.channel

    def start_without(self, reason: str) -> None:
        """Begin without a process, since none could be made. Call before ``start``."""
        self._life = Life(has_backend=False)
        self._unusable_for = reason
        # One process that waits for its place is cheaper, and faster, than a series of them.
        wait_s = self._tier.start_timeout_s * WAIT_FRACTION
        self._context = replace(self._context, wait_s=wait_s)

    def cpu_seconds(self) -> float:
        """Return the processor time of the process so far. For benchmarks."""
        # Linux computes a process's clock id from its pid (clock_getcpuclockid, which Python
        # lacks).
        assert self._child is not None, "no process"
        return time.clock_gettime(~self._child.process.pid << 3 | 2)

    @property
    def traits(self) -> BackendTraits | None:
        """The backend's traits; None while there is no backend yet."""
        return None if self._child is None else self._child.ready.traits

    @property
    def place(self) -> str | None:
        """The backend's place."""
        return None if self._child is None else self._child.ready.place

    def report_losses_by(self, lost_blocks: Callable[[], Mapping[str, int]]) -> None:
        """Set what counts the lost blocks, for the line that the tier is back."""
        self._opening.report_losses_by(lost_blocks)

    def start(self) -> None:
        """Have the backend opened. Does not wait for that."""
        if self._life.state is LifeState.AWAY:
            self._opening.begin_away(self._unusable_for, self._life, self._pause.next_s)
        self.post(Begin())
        self.wake()
        self._watcher.start()

    def post(self, message: Message) -> bool:
        """Take a message for the tier's actor.

        It is sent with the next ``wake``. Return False if ``messages_max`` messages wait
        to be sent, or the tier is ending or disabled.
        """
        with self._using:
            channel = self._channel
            if channel is None or not self._life.accepts_messages:
                return False
            if channel.posted >= self._messages_max:
                return False
            if isinstance(message, OWED_FOR):
                if not self._owed:
                    self._silence = Silence()
                self._owed += 1
            channel.post(message)
        return True

    def wake(self) -> None:
        """Send posted messages, as far as the socket accepts them."""
        channel = self._channel
        if channel is not None and not channel.is_flushed:
            with self._using:
                if self._channel is not None:
                    self._channel.flush()

    def poll(self) -> None:
        """Pass the tier's messages to the link."""
        channel = self._channel
        if channel is not None and channel.has_news:
            with self._using:
                if self._channel is not None:
                    self._deliver(self._channel)
        if self._owed and self._child is not None:
            waited_s = self._silence.not_run_s(self._child.process.pid)
            if waited_s:
                self._link.post(wire.TierNotRun(waited_s))

    def ask_to_end(self) -> None:
        """Take nothing more, end the running work, then end. Returns at once."""
        if not self._life.ending.is_set():
            with self._using:
                self._life.move(LifeEvent.ASKED_TO_END)
                if self._channel is not None:
                    self._channel.post(End())
        self.wake()

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Wait at most so long for a process that was asked to end. False: it still runs."""
        if self._watcher.ident is None:  # it was never started, or could not be
            return self._child is None or self._child.kill()
        deadline_s = time.monotonic() + timeout_s
        while self._watcher.is_alive() and time.monotonic() < deadline_s:
            self._watcher.join(_CLOSE_POLL_S)
            self.wake()  # the socket may not have had room for the last messages
        return not self._watcher.is_alive()

    def give_up(self) -> None:
        """Kill the process. Returns at once."""
        if self._child is not None:
            self._child.process.kill()

    # --- messages from the process ---

    def _deliver(self, channel: Channel[Any]) -> None:
        """Take in new messages. The caller holds ``_using``."""
        try:
            for message in channel.drain():
                self._handle(message)
        except NoMessage as error:  # its memory is damaged, or its code is of another version
            self._say_broke(f"sent an invalid message: {error}")
            assert self._child is not None, "a message of no process"
            self._child.process.kill()

    def _handle(self, message: Message) -> None:
        if isinstance(message, Logged):
            _log(message)
        elif isinstance(message, wire.TierBroke):
            self._say_broke(message.reason)
        elif isinstance(message, Opened):
            self._opening.opened(self.place, self.traits, message.gauges)
        else:
            if isinstance(message, wire.ProbeAnswer | wire.JobEnded):
                self._owed -= 1
                self._silence = Silence()
            self._link.post(message)

    def _say_broke(self, reason: str) -> None:
        self._log_broke(reason)
        self._link.post(wire.TierBroke(reason=reason))

    def _log_broke(self, reason: str) -> None:
        """Log why the tier is disabled, once for each reason in a row."""
        is_news = self._life.broke(reason) and not self._life.ending.is_set()
        self._opening.broke(reason, self._pause.next_s, is_news=is_news)

    # --- the watcher's thread ---

    def _watch(self) -> None:
        """Wait for the process to end, and start another one, until the tier is to end."""
        while True:
            if self._child is not None:
                self._pause.opened()
                self._see_open()
                self._see_out(self._child)
            while not self._life.ending.wait(self._pause.after_a_life()):
                if self._restart():
                    break
            else:
                self._life.move(LifeEvent.ALL_GONE)
                return

    def _see_open(self) -> None:
        """Wait until the tier reports that it is open: an idle engine polls nothing from it."""
        channel = self._channel
        assert channel is not None, "a process without its channel"
        while not (self._opening.is_open or channel.is_ended or self._life.ending.is_set()):
            if channel.wait(_START_POLL_S):
                with self._using:
                    self._deliver(channel)

    def _see_out(self, child: _Child) -> None:
        """Wait for the process to end; then nothing of the tier can touch a slot any more."""
        child.process.wait()
        with self._using:
            channel, self._channel = self._channel, None
            assert channel is not None, "a process without its channel"
            while channel.wait(0.0) and not channel.is_ended:
                self._deliver(channel)
            if not self._life.ending.is_set():
                if self._life.state is LifeState.SERVING:
                    self._say_broke(_how_it_ended(child.process))
                self._life.move(LifeEvent.FENCED)
                self._link.post(wire.TierFenced())
        channel.close()

    def _new_child(self) -> _Child:
        """Start a process, and wait until its backend is made. Raises the cause of a failure."""
        child = _Child(self._tier, self._context, self._memory)
        try:
            child.wait_until_ready(self._life.ending)
        except BaseException:
            self._kill(child)
            raise
        # Later backends make no folder elsewhere.
        self._context = replace(self._context, filesystem=child.ready.filesystem)
        return child

    def _kill(self, child: _Child) -> None:
        """End a process that was given no job. If it hangs in a call, it ends later."""
        if not child.kill():
            self._stuck = child.process

    def _restart(self) -> bool:
        """Start another process. False: its backend can't be made or opened."""
        if self._stuck is not None and self._stuck.poll() is None:
            return False  # another would hang as this one does: one is enough to find out
        try:
            child = self._new_child()
        except Exception as error:  # noqa: BLE001 - another version's process may say anything
            self._log_broke(str(error))
            self._life.move(LifeEvent.FENCED)
            return False
        self._life.move(LifeEvent.MADE)
        try:
            early = self._open(child)
        except Exception as error:  # noqa: BLE001 - as above
            self._log_broke(str(error))
            self._kill(child)
            self._life.move(LifeEvent.FENCED)  # it was given no job
            return False
        with self._using:
            self._child = child
            self._channel = child.channel
            self._owed = 0
            self._life.move(LifeEvent.OPENED)
            for message in early:
                if isinstance(message, Opened):  # logged before the link acts on it
                    self._handle(message)
            self._link.post(wire.TierRestarted(traits=child.ready.traits))
            for message in early:
                self._handle(message)
            if self._life.ending.is_set():
                child.channel.post(End())
        self.wake()
        return True

    def _open(self, child: _Child) -> list[Message]:
        """Have a new process open its backend; return the messages it has sent by then.

        Raises ``StoreFault`` if it can't, or if the tier is to end meanwhile.
        """
        child.channel.post(Begin())
        child.channel.flush()
        deadline_s = time.monotonic() + OPEN_TIMEOUT_S
        early: list[Message] = []
        while not any(isinstance(message, Opened) for message in early):
            for message in early:
                if isinstance(message, wire.TierBroke):
                    raise StoreFault(message.reason)
            is_ending = self._life.ending.is_set()
            if child.channel.is_ended or is_ending or time.monotonic() > deadline_s:
                raise StoreFault("ended, or was to end, before its backend was open")
            child.channel.wait(_CLOSE_POLL_S)
            early += child.channel.drain()
        return early


class _Child:
    """A process that makes the tier's backend, and then waits for ``Begin``."""

    ready: Ready  #: once the backend is made

    def __init__(self, tier: TierConfig, context: BackendContext, memory: SlotMemory) -> None:
        assert memory.descriptor is not None, "memory that no other process can map"
        self._tier = tier
        ours, theirs = socket.socketpair()
        sent = SendCount.new_file()
        self.channel: Channel[Any] = Channel(ours, ToEngine, watched=SendCount(sent))
        descriptors = (theirs.fileno(), memory.descriptor, sent)
        try:
            self.process = spawn(
                [
                    sys.executable,
                    "-c",
                    _PROGRAM,
                    f"kvtier-{tier.name}",  # the process's name
                    str(os.getpid()),
                    *map(str, descriptors),
                    *sys.path,
                ],
                descriptors,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(sent)
        self._send(Setup(tier, context, memory.slot_count, memory.rests))

    def _send(self, setup: Setup) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(pickle.dumps(setup))

    def wait_until_ready(self, ending: threading.Event) -> None:
        """Return once the backend is made. Raises the cause of a failure, or if the tier ends."""
        deadline_s = time.monotonic() + self._tier.start_timeout_s
        while not ending.is_set():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise hangs(self._tier)
            if not self.channel.wait(min(left_s, _START_POLL_S)):
                continue
            for answer in self.channel.drain():
                if isinstance(answer, Logged):  # by the backend while it was made
                    _log(answer)
                    continue
                if isinstance(answer, Ready):
                    self.ready = answer
                    return
                assert isinstance(answer, Refused), "something before the first answer"
                raise _refusal(answer)
            if self.channel.is_ended:
                raise InternalError(
                    f"secondary tier {self._tier.name}: its process, which was not ready yet, "
                    f"{_how_it_ended(self.process)}. Its output is above."
                )
        raise StoreFault("was to end before its backend was made")

    def kill(self) -> bool:
        """End the process. False: it is not gone yet; nothing can hasten that."""
        self.process.kill()
        self.channel.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_S)
            return True
        with suppress(OSError):  # no thread can be started
            BoundedCall(self.process.wait, f"kvtier-{self._tier.name}-reap")
        return False


def _log(line: Logged) -> None:
    log.write(line.level, line.event, dict(line.fields))


def _refusal(answer: Refused) -> Exception:
    """Return the error that kept the process from making its backend."""
    if answer.is_trouble:
        return StorageUnusable(answer.reason)
    return (ConfigError if answer.is_setting else InternalError)(answer.reason)


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        return "is ending"
    if code == -signal.SIGKILL:
        return f"was killed by signal {-code}{OUT_OF_MEMORY}"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"
