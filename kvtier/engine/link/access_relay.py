"""Notifies a tier that evicts of the use of its blocks.

Notices are collected, and sent before the next store, which may evict; otherwise with a tick now
and then: sent with each tick, they would cost most steps a system call, some 15 us.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from kvtier.core import wire
from kvtier.core.policy_actor import POLICY_TIME_S

if TYPE_CHECKING:
    from kvtier.core.actor import Mailbox

SEND_S: Final = 0.1
"""Minimum time between two ticks that send notices of use."""


class AccessRelay:
    """Collects notices of use. Part of a tier's link."""

    def __init__(self, tier: Mailbox) -> None:
        self._tier = tier
        self._unsent: list[wire.TouchKeys | wire.RequestEnded] = []
        self._told_time = 0.0  # the last time sent to the tier's policy
        self._next_s = -math.inf  # no tick sends anything before this

    def add(self, use: wire.TouchKeys | wire.RequestEnded) -> None:
        """Collect a notice until it is sent."""
        self._unsent.append(use)

    def tick(self, now: float) -> None:
        """Send the collected notices, unless some were sent recently."""
        if now >= self._next_s:
            self.send(now)

    def send(self, now: float) -> None:
        """Send the notices. They are dropped if the mailbox is full: the tier then evicts worse."""
        if not self._unsent:
            return
        self._next_s = now + SEND_S
        if now - self._told_time >= POLICY_TIME_S:
            self._told_time = now
            self._tier.post(wire.Tick(now=now))
        for use in self._unsent:
            self._tier.post(use)
        self._unsent.clear()
