"""Logs how many blocks tiers stored while the runtime closed, and how many were lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import wire
from kvtier.plugin_api.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvtier.core.actor import Actor
    from kvtier.core.wire import Message
    from kvtier.engine.link.tier_link import TierLink
    from kvtier.engine.primary.primary_tier import PrimaryTier


class Closing:
    """Counts the stores of all tiers once the engine begins to shut down."""

    def __init__(
        self, primary: PrimaryTier, links: Sequence[TierLink], clock: Callable[[], float]
    ) -> None:
        self._primary = primary
        self._links = links
        self._clock = clock
        self._began_s = clock()
        self._before = [link.statistics().counts for link in links]

    def log_end(self, arrived: Iterable[tuple[Actor, Message]]) -> None:
        """Log the totals. ``arrived``: messages that came too late for the links to handle them."""
        last = [(to, message) for to, message in arrived if isinstance(message, wire.JobEnded)]
        deferred = self._primary.deferred_blocks()
        stored, lost = 0, {}
        for number, (link, before) in enumerate(zip(self._links, self._before, strict=True)):
            at_last = sum(link.stored_blocks_of(message) for to, message in last if to is link)
            now = link.statistics()
            stored += link.stored_blocks_since(before) + at_last
            unsent = now.cascade_slots - at_last + deferred.get(number, 0)
            lost[now.name] = unsent + now.counts.cascades_dropped - before.cascades_dropped
        by_tier = ", ".join(f"{name}: {count}" for name, count in lost.items() if count)
        log.info(
            "kvtier is closed",
            stored_blocks=stored,
            lost_blocks=sum(lost.values()),
            **({"lost": by_tier} if by_tier else {}),
            seconds=round(self._clock() - self._began_s, 3),
        )
