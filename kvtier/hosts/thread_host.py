"""Hosts a tier's cell in a daemon thread of the engine's process.

A cell that broke is followed by another, with fresh actors and a fresh
backend, once none of its threads can touch a slot any more.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import anyio

from kvtier.core import messages as m
from kvtier.core.tier_host import ABANDON_S, TierHost
from kvtier.hosts.restarts import RESTART_PAUSE_S, RestartPause
from kvtier.hosts.starting import Opening
from kvtier.plugin_api.log import log
from kvtier.plugin_api.threads import Bell
from kvtier.settings.plugins import fallback_policy
from kvtier.tier.cell import TierCell, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.core.actor import Mailbox
    from kvtier.core.messages import Message
    from kvtier.plugin_api.backend import Backend, BackendTraits
    from kvtier.plugin_api.eviction_policy import EvictionPolicy
    from kvtier.plugin_api.slot_memory import SlotMemory

QUIET_POLL_S: Final = 0.1


def _no_policy(_traits: BackendTraits) -> None:
    """Say that nothing is ever evicted."""


class TierThread(TierHost):
    """Runs one tier's cells, one after the other, on a thread. Any thread may ``post``."""

    def __init__(
        self,
        name: str,
        backend: Backend | None,
        memory: SlotMemory,
        link: Mailbox,
        *,
        messages_max: int,
        make_backend: Callable[[], Backend],
        policy_of: Callable[[BackendTraits], Callable[[], EvictionPolicy] | None] = _no_policy,
    ) -> None:
        """``backend`` serves first; ``make_backend`` makes another for each new beginning.

        Without a ``backend``, set ``unusable_for`` before the start. ``policy_of``
        tells how to make the eviction policy of a backend with these traits.
        """
        self.name = name
        self.unusable_for: str | None = None
        self.opening = Opening(name, "thread")
        self.place_found: str | None = None  #: to ask the backend may take its storage
        self.backend = backend
        self._make_backend = make_backend
        self._memory = memory
        self._link = link
        self._messages_max = messages_max
        self._policy_of = policy_of
        self._taking = threading.Lock()
        self._is_taking = backend is not None
        self._bell = Bell()
        self._pause = RestartPause(RESTART_PAUSE_S)
        self._ending = threading.Event()
        self._abandoned = False
        self._is_quiet = False  # said by the thread at its end: a backend may hang when asked
        self._broke_of: str | None = None  # why the cell is cut off, as it is in the log
        self._cell = None if backend is None else self._new_cell(backend)
        self._is_making = False  # a backend, while nothing of the tier can touch a slot
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{name}", daemon=True)

    def _new_cell(self, backend: Backend) -> TierCell:
        policy = self._policy_of(backend.traits)
        return TierCell(self.name, backend, self._memory, self._link, policy, fallback_policy())

    @property
    def traits(self) -> BackendTraits | None:
        """The backend's; None while there is none yet."""
        return None if self.backend is None else self.backend.traits

    @property
    def place(self) -> str | None:
        """The backend's, as it was at the start."""
        return self.place_found

    def start(self) -> None:
        """Start the thread. The backend is opened on it; nothing here waits for that."""
        if self.backend is None:
            self._broke_of = self.unusable_for or "it has no backend"
            self.opening.broke()
            self._link.post(m.TierBroke(reason=self._broke_of))
            self._link.post(m.TierFenced())
        self._thread.start()

    def post(self, message: Message) -> bool:
        """Take a message for the tier's actor, from any thread.

        It is delivered after the next ``wake``. False: ``messages_max``
        messages wait, or the cell is ending or cut off.
        """
        # Under the lock: a message must not slip in behind the clearing of a cell
        # that broke, and be carried out by the next one for slots long given away.
        with self._taking:
            if not self._is_taking or self._cell is None:
                return False
            if len(self._cell.arrived) >= self._messages_max:
                return False
            self._cell.post(message)
        return True

    def wake(self) -> None:
        """Have what was posted delivered. Any thread; the scheduler does it once a step."""
        cell = self._cell
        if cell is not None and cell.arrived and not cell.is_woken:
            cell.is_woken = True
            self._bell.ring()

    def take(self) -> None:
        """Do nothing: the tier's actor posts to the link by itself."""
        return

    def ask_to_end(self) -> None:
        """Take nothing more, end what was begun, then end. Returns at once."""
        with self._taking:
            self._is_taking = False
            self._ending.set()
        self._bell.ring()

    def close(self, timeout_s: float) -> bool:
        """Ask the cell to end and wait up to ``timeout_s``. False: something still runs."""
        self.ask_to_end()
        if self._thread.ident is None or self._is_making:  # it has not started, and won't
            return True
        self._thread.join(max(0.0, timeout_s - ABANDON_S))
        if self._thread.is_alive():
            self._abandoned = True
            self._bell.ring()
            self._thread.join(min(timeout_s, ABANDON_S))
        return not self._thread.is_alive() and self._is_quiet

    # --- the thread ---

    def _run(self) -> None:
        self._live_on()
        self._is_quiet = self._cell is None or self._cell.driver.is_quiet()

    def _live_on(self) -> None:
        while not self._ending.is_set():
            try:
                if self._broke_of is not None and not self._make_anew():
                    return
                anyio.run(self._live)
            except BaseException as error:  # noqa: BLE001 - a bug in a tier must not end its thread
                self._break_down(error)
                if self._ending.wait(self._pause.after_a_life()):
                    return

    def _make_anew(self) -> bool:
        """Make a backend, for a closed one isn't opened again. False: the tier is to end.

        May hang. ``close`` doesn't wait for that: no slot is known here.
        """
        self._is_making = True
        try:
            backend = self._make_backend()
            cell = self._new_cell(backend)
            self.place_found = self.place_found or backend.place
        finally:
            with self._taking:
                self._is_making = self._ending.is_set()
        if self._is_making:
            return False
        self.backend, self._cell = backend, cell
        return True

    async def _live(self) -> None:
        assert self._cell is not None, "a life without its cell"
        await self._cell.live(
            self._bell,
            opened=self._opened,
            is_ending=self._ending.is_set,
            is_abandoned=lambda: self._abandoned,
        )

    def _break_down(self, error: BaseException) -> None:
        cell = self._cell
        with self._taking:
            self._is_taking = False
            if cell is not None:
                cell.arrived.clear()
        self.opening.broke()
        reason = reason_of(error)
        if reason != self._broke_of:
            self._broke_of = reason
            log.error("tier broke", tier=self.name, error=reason)
        self._link.post(m.TierBroke(reason=reason))
        if cell is not None:
            cell.driver.stop()
            while not cell.driver.is_quiet():
                if self._ending.wait(QUIET_POLL_S):
                    return
        self._link.post(m.TierFenced())

    def _opened(self, levels: Mapping[str, int]) -> None:
        """Take messages again, if this follows a cell that broke."""
        self._pause.opened()
        self.opening.opened(self.place, self.traits, levels)
        if self._broke_of is not None:
            self._broke_of = None
            with self._taking:
                self._is_taking = not self._ending.is_set()
            self._link.post(m.TierRestarted(traits=self.traits))
