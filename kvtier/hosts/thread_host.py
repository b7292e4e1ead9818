"""Hosts a tier's cell in a daemon thread of the engine's process.

A cell that broke is followed by another, with fresh actors and a fresh
backend, once none of its threads can touch a slot any more.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import anyio

from kvtier.core import wire
from kvtier.core.tier_host import ABANDON_S, TierHost
from kvtier.hosts.life import Life, LifeEvent, LifeState
from kvtier.hosts.restarts import RESTART_PAUSE_S, RestartPause
from kvtier.hosts.starting import Opening, hangs
from kvtier.plugin_api.threads import BoundedCall, ThreadWaker, daemon_thread
from kvtier.settings.plugins import fallback_policy
from kvtier.tier.cell import TierCell, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.core.actor import Mailbox
    from kvtier.core.wire import Message
    from kvtier.plugin_api.backend import Backend, BackendTraits
    from kvtier.plugin_api.eviction_policy import EvictionPolicy
    from kvtier.plugin_api.slot_memory import SlotMemory
    from kvtier.settings.runtime_config import TierConfig

QUIET_POLL_S: Final = 0.1


def _no_policy(_traits: BackendTraits) -> None:
    """Return None: nothing is ever evicted."""


class TierThread(TierHost):
    """Runs one tier's cells, one after the other, on a thread. Any thread may ``post``.

    ``make`` it first.
    """

    def __init__(
        self,
        tier: TierConfig,
        memory: SlotMemory,
        link: Mailbox,
        *,
        messages_max: int,
        make_backend: Callable[[], Backend],
        policy_of: Callable[[BackendTraits], Callable[[], EvictionPolicy] | None] = _no_policy,
    ) -> None:
        """``make_backend`` makes another backend for each restart.

        ``policy_of`` returns the factory of the eviction policy of a backend with these traits.
        """
        self.name = tier.name
        self._unusable_for: str | None = None
        self._opening = Opening(tier.name, "thread", link)
        self._tier = tier
        self._place: str | None = None
        self._backend: Backend | None = None
        self._make_backend = make_backend
        self._hanging: BoundedCall[tuple[Backend, str | None]] | None = None  # makes a backend
        self._memory = memory
        self._link = link
        self._messages_max = messages_max
        self._policy_of = policy_of
        self._lock = threading.Lock()
        self._life = Life(has_backend=True)
        self._waker = ThreadWaker()
        self._pause = RestartPause(RESTART_PAUSE_S)
        self._abandoned = False
        self._cell: TierCell | None = None
        self._thread = daemon_thread(self._run, f"kvtier-{tier.name}")

    def make(self) -> None:
        """Make the first backend, in a thread of its own: its storage may hang.

        Raises ``ConfigError`` for a bad setting; ``StorageUnusable`` also if that
        takes longer than ``start_timeout_s``.
        """

        def with_place() -> tuple[Backend, str | None]:
            backend = self._make_backend()
            return backend, backend.place  # which may look at the storage too

        first = BoundedCall(with_place, f"kvtier-{self.name}-start")
        if not first.wait(self._tier.start_timeout_s):
            self._hanging = first
            raise hangs(self._tier)
        backend, self._place = first.result()
        self._cell = self._new_cell(backend)
        self._backend = backend

    def start_without(self, reason: str) -> None:
        """Begin with no backend, which could not be made. Before ``start``."""
        self._life = Life(has_backend=False)
        self._unusable_for = reason

    def _new_cell(self, backend: Backend) -> TierCell:
        try:
            policy = self._policy_of(backend.traits)
            return TierCell(self.name, backend, self._memory, self._link, policy, fallback_policy())
        except BaseException:  # its policy can't be made
            self._discard(backend)
            raise

    @property
    def traits(self) -> BackendTraits | None:
        """The backend's traits; None while there is no backend yet."""
        return None if self._backend is None else self._backend.traits

    @property
    def place(self) -> str | None:
        """The backend's place, as it was at the start."""
        return self._place

    def report_losses_by(self, lost_blocks: Callable[[], Mapping[str, int]]) -> None:
        """Set what counts the lost blocks, for the line that the tier is back."""
        self._opening.report_losses_by(lost_blocks)

    def start(self) -> None:
        """Start the thread. The backend is opened on it; does not wait for that."""
        if self._life.state is LifeState.AWAY:
            self._opening.begin_away(self._unusable_for, self._life, retry_s=0.0)
        self._thread.start()

    def post(self, message: Message) -> bool:
        """Take a message for the tier's actor, from any thread.

        It is delivered after the next ``wake``. Return False if ``messages_max``
        messages wait, or the cell is ending or disabled.
        """
        # Under the lock: a message must not slip in behind the clearing of a cell
        # that broke, and be carried out by the next one for slots long reassigned.
        with self._lock:
            if not self._life.accepts_messages or self._cell is None:
                return False
            if len(self._cell.arrived) >= self._messages_max:
                return False
            self._cell.post(message)
        return True

    def wake(self) -> None:
        """Have the posted messages delivered. Any thread; the scheduler does it once a step."""
        cell = self._cell
        if cell is not None and cell.wants_waking():
            self._waker.wake()

    def poll(self) -> None:
        """Do nothing: the tier's actor posts to the link by itself."""
        return

    def ask_to_end(self) -> None:
        """Take nothing more, end the running work, then end. Returns at once."""
        with self._lock:
            self._life.move(LifeEvent.ASKED_TO_END)
        self._waker.wake()

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Wait at most so long for a tier that was asked to end. False: something still runs."""
        if self._thread.ident is None:
            backend, self._backend = self._backend, None
            if backend is not None:
                self._discard(backend)
            return True
        # Its thread may hang while making a backend, which touches no slot.
        if self._life.has_ended:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self._life.has_ended

    def give_up(self) -> None:
        """Release what was begun, ended or not. Returns at once."""
        self._abandoned = True
        self._waker.wake()

    def _discard(self, backend: Backend) -> None:
        """Give up a backend that was never opened."""
        with suppress(OSError):  # no thread can be started: the process's end releases it
            discarding = BoundedCall(backend.discard, f"kvtier-{self.name}-discard")
            discarding.wait(ABANDON_S)  # it touches no slot

    # --- the thread ---

    def _run(self) -> None:
        self._live_on()
        # A call may end a little after its cell: on slow storage that does not mean a hung tier.
        while not (self._cell is None or self._cell.driver.is_quiet()):
            if self._abandoned:
                return
            time.sleep(QUIET_POLL_S)
        self._life.move(LifeEvent.ALL_GONE)

    def _live_on(self) -> None:
        while not self._life.ending.is_set():
            try:
                if self._life.state is LifeState.AWAY and not self._make_anew():
                    return
                anyio.run(self._live)
            except BaseException as error:  # noqa: BLE001 - a bug in a tier must not end its thread
                self._break_down(error)
                if self._life.ending.wait(self._pause.after_a_life()):
                    return

    def _make_anew(self) -> bool:
        """Make a backend, since a closed one isn't reopened. False: the tier has ended.

        May hang. ``close`` doesn't wait for that: no slot is in use here.
        """
        hanging, self._hanging = self._hanging, None
        # A second call must not hang beside the first.
        backend = self._make_backend() if hanging is None else hanging.result()[0]
        cell = self._new_cell(backend)
        place = self._place or backend.place
        with self._lock:
            has_ended = self._life.move(LifeEvent.MADE) is LifeState.ENDED
            if not has_ended:
                self._backend, self._cell, self._place = backend, cell, place
        if has_ended:
            self._discard(backend)
        return not has_ended

    async def _live(self) -> None:
        assert self._cell is not None, "a life without its cell"
        await self._cell.live(
            self._waker,
            opened=self._opened,
            is_ending=self._life.ending.is_set,
            is_abandoned=lambda: self._abandoned,
        )

    def _break_down(self, error: BaseException) -> None:
        cell, reason = self._cell, reason_of(error)
        with self._lock:
            is_news = self._life.broke(reason)
            if cell is not None:
                cell.arrived.clear()
        self._opening.broke(reason, self._pause.next_s, is_news=is_news)
        self._link.post(wire.TierBroke(reason=reason))
        if cell is not None:
            cell.driver.stop()
            while not cell.driver.is_quiet():
                if self._life.ending.wait(QUIET_POLL_S):
                    return
        self._life.move(LifeEvent.FENCED)
        self._link.post(wire.TierFenced())

    def _opened(self, gauges: Mapping[str, int]) -> None:
        """Accept messages again, if this follows a cell that broke."""
        self._pause.opened()
        self._opening.opened(self.place, self.traits, gauges)
        if self._life.state is LifeState.REOPENING:
            self._life.move(LifeEvent.OPENED)
            self._link.post(wire.TierRestarted(traits=self.traits))
