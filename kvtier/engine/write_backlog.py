"""How much of host memory the stores of one tier may hold, and what becomes of the rest.

What finds no room, or waits while the tier takes no stores, is deferred: its slots are free to be
used otherwise, and the primary tier offers it again when the link asks for it
(``kvtier/engine/missing_prefixes.py``).

Part of a link's actor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.core import messages as m
from kvtier.plugin_api.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.actor import Mailbox
    from kvtier.core.statistics import TierCounts
    from kvtier.engine.jobs import Job
    from kvtier.engine.request_tiers import RequestRelay
    from kvtier.plugin_api.backend import BackendTraits
    from kvtier.settings.runtime_config import RuntimeConfig

AGAIN_S: Final = 1.0
"""After a store that failed, or could not be sent, what was deferred waits for so long."""


class WriteBacklog:
    """Of one tier."""

    def __init__(
        self,
        number: int,
        config: RuntimeConfig,
        counts: TierCounts,
        relay: RequestRelay,
        primary: Mailbox,
    ) -> None:
        """``number``: the tier's."""
        self.slots = 0  #: pinned for what waits to be stored, or is being stored
        self._request_scoped = (
            False  # the tier wants blocks for the request that brings them, or never
        )
        self._number = number
        self._slots_max = config.cascade_slots_max
        self._full_pause_s = config.breaker_pause_s
        self._counts = counts
        self._relay = relay
        self._primary = primary
        self._full_until = 0.0
        self._again_from = 0.0
        self.has_deferred = self._has_asked = False

    def set_traits(self, traits: BackendTraits) -> None:
        """Learn what the tier's backend is."""
        self._request_scoped = traits.request_scoped

    def is_full(self, now: float) -> bool:
        """Tell whether the tier had no room lately. ``now``: in seconds of the link's clock."""
        return now < self._full_until

    def take(self, message: m.Cascade) -> tuple[m.Cascade, m.Cascade]:
        """Return what there is room for, which counts as held from now on, and the rest."""
        room = max(0, self._slots_max - self.slots)
        kept = message.part(0, room)
        self.slots += len(kept.keys)
        return kept, message.part(room)

    def defer(self, blocks: Job | m.Cascade) -> None:
        """Release blocks that are to be stored later; what one request brings, for good."""
        if self._request_scoped:
            self.drop(blocks)
        elif blocks.keys:
            self._counts.stores_deferred += len(blocks.keys)
            self.has_deferred = True
            self._primary.post(
                m.CascadeDeferred(
                    self._number, blocks.request, blocks.keys, blocks.slots, blocks.epoch
                )
            )

    def drop(self, blocks: Job | m.Cascade) -> None:
        """Release blocks of which the tier knows nothing, for good."""
        if blocks.keys:
            self._counts.cascades_dropped += len(blocks.keys)
            self._end(blocks)
            if self._request_scoped:
                self._relay.send(m.BlocksMissing(blocks.request, blocks.keys))

    def refused(self, message: m.CascadeRefused) -> None:
        """Release what the tier's admission policy does not want."""
        self._counts.cascades_refused += len(message.keys)
        self._end(message)

    def not_sent(self, job: Job, now: float) -> None:
        """Release what was held and is not sent now, nor for a while."""
        self.slots -= len(job.slots)
        if not self.is_full(now):  # then it is known from when on
            self._again_from = now + AGAIN_S
        self.defer(job)

    def stored(self, job: Job, outcomes: Sequence[Outcome], now: float) -> bool:
        """Release what a job has stored, defer what it has not; tell whether it is whole."""
        self.slots -= len(job.slots)
        is_done = [outcome is Outcome.DONE or self._request_scoped for outcome in outcomes]
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

    def restart(self) -> None:
        """Note that a fresh cell serves the tier."""
        self._full_until = self._again_from = 0.0

    def ask_again(self, now: float) -> None:
        """Ask for what was deferred, if there is any, and room. The tier must take stores now."""
        room = self._slots_max - self.slots
        if self.has_deferred and not self._has_asked and room > 0 and now >= self._again_from:
            self._has_asked, self.has_deferred = True, False
            self._primary.post(m.StoresWanted(self._number, room))

    def offered(self, message: m.StoresOffered) -> None:
        """Learn whether there is more of what was deferred."""
        self._has_asked = False
        self.has_deferred |= not message.is_all
        self._counts.cascades_dropped += message.lost
