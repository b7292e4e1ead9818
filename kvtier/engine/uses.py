"""What a tier that evicts is told of the use of its blocks: collected, and sent once a tick."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import messages as m
from kvtier.core.policy_actor import POLICY_TIME_S

if TYPE_CHECKING:
    from kvtier.core.actor import Mailbox


class UseRelay:
    """Part of a tier's link."""

    def __init__(self, tier: Mailbox) -> None:
        self._tier = tier
        self._unsent: list[m.TouchKeys | m.RequestEnded] = []
        self._told_time = 0.0  # that the tier's policy was told last

    def __bool__(self) -> bool:
        """Tell whether anything waits for the next tick."""
        return bool(self._unsent)

    def add(self, use: m.TouchKeys | m.RequestEnded) -> None:
        """Keep it for the next tick."""
        self._unsent.append(use)

    def send(self, now: float) -> None:
        """Send what there is. Dropped if the mailbox is full: the tier then evicts worse."""
        if not self._unsent:
            return
        if now - self._told_time >= POLICY_TIME_S:
            self._told_time = now
            self._tier.post(m.Tick(now=now))
        for use in self._unsent:
            self._tier.post(use)
        self._unsent.clear()
