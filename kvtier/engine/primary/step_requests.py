"""Sends a step's probes and promotions to the secondary tiers, together when the step ends.

A tier is then asked once for all blocks that a request needs of it. For a request-scoped tier that
may be the only time: vLLM's ``p2p`` delivers only the blocks that a request asks for first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import messages as m

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.core.actor import Mailbox
    from kvtier.engine.primary.promotions import Promotions
    from kvtier.engine.primary.requests import Request
    from kvtier.engine.primary.tier_directory import TierDirectory
    from kvtier.plugin_api.keys import RequestId


class StepRequests:
    """Sends the links the probes and promotions of lookups. Part of the primary tier's actor."""

    def __init__(
        self,
        directory: TierDirectory,
        promotions: Promotions,
        requests: Mapping[RequestId, Request],
        links: Sequence[Mailbox],
        wait_timeout_s: float,
    ) -> None:
        """``wait_timeout_s``: no request waits for longer."""
        self._directory = directory
        self._promotions = promotions
        self._requests = requests
        self._links = links
        self._wait_timeout_s = wait_timeout_s
        self._ticks = 0  # since a step ended

    def end_step(self, epoch: int) -> None:
        """Send the step's probes and promotions, and end state that lasts for a step."""
        self._ticks = 0
        self._send(epoch)

    def tick(self, epoch: int) -> None:
        """Send them too if the step takes long: it may never end."""
        self._ticks += 1
        if self._ticks > 1:
            self._send(epoch)

    def _send(self, epoch: int) -> None:
        if not self._links:
            return
        self._directory.end_step()
        for tier, name, probed in self._directory.pop_unsent():
            in_order = self._directory.asks_in_order(name)
            asked = m.ProbeKeys(tuple(probed), asker=name, in_order=in_order)
            self._links[tier].post(asked)
        for name, tier, probed in self._directory.pop_unsent_apart():
            self._links[tier].post(m.ProbeKeys(tuple(probed), name, asker=name))
        for (tier, name), (keys, slots) in self._promotions.pop_unsent().items():
            request, longest_s = self._requests.get(name), self._wait_timeout_s
            patience_s = longest_s if request is None else min(request.patience_s, longest_s)
            most_s = longest_s if request is None else min(request.patience_max_s, longest_s)
            promote = m.Promote(tuple(keys), tuple(slots), epoch, name, patience_s, most_s)
            self._links[tier].post(promote)
