"""Limits how much host memory the stores of one tier may hold, and defers the rest.

A block that finds no room, or waits while the tier takes no stores, is deferred: its slot is free
for other use, and the primary tier offers the block again when the link requests it
(``kvtier/engine/primary/cascades.py``).

Part of a link's actor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.plugin_api.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.actor import Mailbox
    from kvtier.core.statistics import TierCounts
    from kvtier.engine.link.jobs import Job
    from kvtier.engine.link.relays import RequestRelay
    from kvtier.settings.runtime_config import RuntimeConfig

AGAIN_S: Final = 1.0
"""How long deferred blocks wait after a store that failed, or could not be sent."""


class WriteBacklog:
    """The write backlog of one tier."""

    def __init__(
        self,
        number: int,
        config: RuntimeConfig,
        counts: TierCounts,
        relay: RequestRelay,
        primary: Mailbox,
    ) -> None:
        """``number``: the tier's."""
        self._defers = True
        self._number = number
        self._slots_max = config.cascade_slots_max
        self._full_pause_s = config.breaker_pause_s
        self._counts = counts
        self._relay = relay
        self._primary = primary
        self._full_until = 0.0
        self._again_from = 0.0
        self.has_deferred = self._has_asked = False

    def set_defers(self, *, defers: bool) -> None:
        """Set whether to defer blocks; else the tier gets each now, for its request, or never."""
        self._defers = defers

    def is_full(self, now: float) -> bool:
        """Return whether the tier recently had no room. ``now``: seconds of the link's clock."""
        return now < self._full_until

    def admit(self, message: m.Cascade, held: int) -> tuple[m.Cascade, m.Cascade]:
        """Return the blocks that have room, and the rest. ``held``: slots that stores hold now."""
        room = max(0, self._slots_max - held)
        return message.part(0, room), message.part(room)

    def defer(self, blocks: Job | m.Cascade) -> None:
        """Release blocks to store later, or drop them if the tier does not want them then."""
        if not self._defers:
            self.drop(blocks)
        elif blocks.keys:
            self._counts.stores_deferred += len(blocks.keys)
            self.has_deferred = True
            request, keys, slots = blocks.request, blocks.keys, blocks.slots
            deferred = m.CascadeDeferred(self._number, request, keys, slots, blocks.epoch)
            self._primary.post(deferred)

    def drop(self, blocks: Job | m.Cascade) -> None:
        """Release blocks permanently: the tier does not have them."""
        if blocks.keys:
            self._counts.cascades_dropped += len(blocks.keys)
            self._end(blocks)
            if not self._defers:  # their request waits for them
                self._relay.send(wire.BlocksMissing(blocks.request, blocks.keys))

    def refused(self, message: m.CascadeRefused) -> None:
        """Release the blocks that the tier's admission policy has refused."""
        self._counts.cascades_refused += len(message.keys)
        self._end(message)

    def not_sent(self, job: Job, now: float) -> None:
        """Release the blocks of a job that is not sent now, nor for a while."""
        if not self.is_full(now):  # else ``_again_from`` is set already
            self._again_from = now + AGAIN_S
        self.defer(job)

    def stored(self, job: Job, outcomes: Sequence[Outcome], now: float) -> bool:
        """Release stored blocks of a job, defer the others; return whether all were stored."""
        is_done = [outcome is Outcome.DONE or not self._defers for outcome in outcomes]
        if Outcome.FULL in outcomes:
            # No room now: trying each block would only cost its pin. Loads go on.
            self._full_until = self._again_from = now + self._full_pause_s
        if all(is_done):
            self._end(job)
            return True
        if any(is_done):
            self._end(job.blocks_of(is_done))
        self.defer(job.blocks_of([not each for each in is_done]))
        self._again_from = max(self._again_from, now + AGAIN_S)
        return False

    def _end(self, blocks: Job | m.Cascade | m.CascadeRefused) -> None:
        self._primary.post(m.CascadeEnded(self._number, blocks.keys, blocks.slots, blocks.epoch))

    def stop(self) -> None:
        """Forget the deferred blocks: the link broke."""
        self.has_deferred = False

    def restart(self) -> None:
        """Note that a fresh cell serves the tier."""
        self._full_until = self._again_from = 0.0

    def ask_again(self, now: float, held: int) -> None:
        """Request deferred blocks, if there are any, and room. The tier must take stores now.

        ``held``: slots that stores hold now.
        """
        room = self._slots_max - held
        if self.has_deferred and not self._has_asked and room > 0 and now >= self._again_from:
            self._has_asked, self.has_deferred = True, False
            self._primary.post(m.StoresWanted(self._number, room))

    def offered(self, message: m.StoresOffered) -> None:
        """Note whether there are more deferred blocks."""
        self._has_asked = False
        self.has_deferred |= not message.is_all
        self._counts.cascades_dropped += message.lost

    def lost(self, message: m.StoresLost) -> None:
        """Count deferred blocks that the tier will not get."""
        self._counts.cascades_dropped += message.blocks
