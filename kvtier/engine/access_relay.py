"""What a tier that evicts is told of the use of its blocks.

It is collected, and sent before the next store, which may evict; else with a tick now and then:
sent with each, it would cost most steps a system call, some 15 us.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kvtier.core import messages as m
from kvtier.core.policy_actor import POLICY_TIME_S

if TYPE_CHECKING:
    from kvtier.core.actor import Mailbox

SEND_S: Final = 0.1
"""Between two ticks that send what was used."""


class AccessRelay:
    """Part of a tier's link."""

    def __init__(self, tier: Mailbox) -> None:
        self._tier = tier
        self._unsent: list[m.TouchKeys | m.RequestEnded] = []
        self._told_time = 0.0  # that the tier's policy was told last
        self._next_s = -math.inf  # no tick sends anything before

    def add(self, use: m.TouchKeys | m.RequestEnded) -> None:
        """Keep it until it is sent."""
        self._unsent.append(use)

    def tick(self, now: float) -> None:
        """Send what there is, unless some was sent lately."""
        if now >= self._next_s:
            self.send(now)

    def send(self, now: float) -> None:
        """Send what there is. Dropped if the mailbox is full: the tier then evicts worse."""
        if not self._unsent:
            return
        self._next_s = now + SEND_S
        if now - self._told_time >= POLICY_TIME_S:
            self._told_time = now
            self._tier.post(m.Tick(now=now))
        for use in self._unsent:
            self._tier.post(use)
        self._unsent.clear()
