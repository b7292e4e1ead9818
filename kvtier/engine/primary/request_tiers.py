"""Notifies request-scoped tiers of requests, and sends them the requests' blocks.

Such a tier is notified only of requests that come with parameters for it. It is asked for blocks of
one request at a time, and takes all blocks that the request stores, including those that were here
before. It is notified of the latter, since it may not want them. Blocks that are still being filled
follow once they are READY.

The tier is notified of a request's end after the last of these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import messages as m
from kvtier.core import wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtier.core.actor import Mailbox
    from kvtier.engine.primary.cascades import Cascades
    from kvtier.engine.primary.promotions import Batch
    from kvtier.engine.primary.slot_table import SlotTable
    from kvtier.plugin_api.keys import Key, RequestId, TierSet


class _Open:
    """A request that tiers were notified of. ``unready``: its blocks that are still to follow."""

    __slots__ = ("is_over", "unready")

    def __init__(self) -> None:
        self.unready = 0
        self.is_over = False


class RequestTiers:
    """Tracks which requests go to request-scoped tiers. Part of the primary tier's actor."""

    def __init__(
        self, slots: SlotTable, cascades: Cascades, links: Sequence[Mailbox], policy: Mailbox
    ) -> None:
        self.tiers: TierSet = 0  #: request-scoped tiers
        self._slots = slots
        self._cascades = cascades
        self._links = links
        self._policy = policy
        self._epoch = 0
        self._open: dict[RequestId, _Open] = {}
        self._awaited: dict[Key, list[RequestId]] = {}  # offered by these, filled for others

    def mark_request_scoped(self, message: m.TierIsRequestScoped) -> None:
        """Notify this tier of requests from now on, and send it only blocks of theirs."""
        self.tiers |= 1 << message.tier
        self._cascades.leave_to_requests(message.tier)

    def start(self, message: m.RequestStarted) -> TierSet:
        """Begin a request; return the tiers that may be asked for its blocks."""
        if not self.tiers:
            return message.tiers
        if not message.params:
            return message.tiers & ~self.tiers
        self._open[message.request] = _Open()
        self._tell(wire.RequestOpened(message.request, message.params, message.peer))
        return message.tiers

    def end(self, request: RequestId) -> None:
        """Note that the request is over; tiers are notified once no block of it is to follow."""
        each = self._open.get(request)
        if each is not None:
            each.is_over = True
            self._follow(request, 0)

    def takers(self, request: RequestId) -> TierSet:
        """Return the tiers that take blocks that the request stores."""
        taking = self._cascades.takers
        return taking if request in self._open else taking & ~self.tiers

    def store(self, request: RequestId, blocks: int) -> None:
        """Note that the GPU writes blocks for the request."""
        self._follow(request, blocks)

    def stored(self, request: RequestId, blocks: int) -> None:
        """Note that the GPU has written blocks for the request, or failed to."""
        self._follow(request, -blocks)

    def of_offered(self, keys: Iterable[Key], request: RequestId) -> dict[int, Batch]:
        """Return the READY ones of offered blocks, by tier to send them to; others follow later."""
        if request not in self._open:
            return {}
        ready: Batch = ([], [])
        hits: list[Key] = []
        for key in keys:
            slot = self._slots.slot_of[key]
            if self._slots.is_ready(slot):
                hits.append(key)
                ready[0].append(key)
                ready[1].append(slot)
            elif self._slots.gpu_fills.get(slot) != request:  # its own go to all takers
                hits.append(key)
                self._awaited.setdefault(key, []).append(request)
                self._follow(request, 1)
        if hits:
            self._tell(wire.PrefixHits(request, tuple(hits)))
        return self._to_each(ready)

    def became_ready(self, keys: Sequence[Key], slots: Sequence[int]) -> None:
        """Send blocks that requests have waited for."""
        if not self._awaited:
            return
        for key, slot in zip(keys, slots, strict=True):
            for request in self._awaited.pop(key, ()):
                self._cascades.send(self._to_each(([key], [slot])), request, self._epoch)
                self._follow(request, -1)

    def pin_wanted(self, message: wire.BlocksWanted) -> None:
        """Pin and send the READY blocks for another engine's request; report the missing ones."""
        keys: list[Key] = []
        slots: list[int] = []
        for key in message.keys:
            slot = self._slots.slot_of.get(key)
            if slot is not None and self._slots.is_ready(slot):
                keys.append(key)
                slots.append(slot)
        link = self._links[message.tier]
        if keys:
            self._slots.pin(slots)
            self._policy.post(m.Held(keys=tuple(keys)))
            link.post(m.Cascade(message.request, tuple(keys), tuple(slots), self._epoch))
        there = set(keys)
        missing = tuple(key for key in message.keys if key not in there)
        if missing:
            link.post(wire.BlocksMissing(message.request, missing))

    def forget(self, key: Key) -> None:
        """Note that the key's fill has failed."""
        for request in self._awaited.pop(key, ()):
            self._follow(request, -1)

    def reset(self, epoch: int) -> None:
        """Wait for no block any more: fills from before the new epoch are void."""
        self._epoch = epoch
        self._awaited.clear()
        for request, each in list(self._open.items()):
            each.unready = 0
            self._follow(request, 0)

    def _to_each(self, batch: Batch) -> dict[int, Batch]:
        if not batch[0]:
            return {}
        taking = self.tiers & self._cascades.takers
        return {tier: batch for tier in range(taking.bit_length()) if taking >> tier & 1}

    def _follow(self, request: RequestId, blocks: int) -> None:
        """Count blocks of the request that are still to follow."""
        each = self._open.get(request)
        if each is None:
            return
        each.unready += blocks
        assert each.unready >= 0, "a block followed that no request waited for"
        if each.is_over and not each.unready:
            del self._open[request]
            self._tell(wire.RequestClosed(request))

    def _tell(self, message: wire.RequestOpened | wire.RequestClosed | wire.PrefixHits) -> None:
        for tier, link in enumerate(self._links):
            if self.tiers >> tier & 1:
                link.post(message)
