"""Converts the times that cross between an engine with a clock of its own and its tiers.

A tier counts on ``time.monotonic``, which all processes of a machine share. So does an engine,
and then nothing here runs. A replay's clock skips time, and a soak's leaps: such an engine counts
on its own clock, but its tiers, which need real time, on the machine's. The conversion keeps the
distance from now at the moment when the message crosses. The clock may skip before and after.

It is not in ``time_left_s``, which would need the engine's clock in another process, nor in the
link, whose actor reads no clock.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvtier.core import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.core.actor import Mailbox
    from kvtier.core.wire import Message


def to_machine_time(tier: Mailbox, clock: Callable[[], float]) -> Mailbox:
    """Return the mailbox of a tier for a link on that clock."""
    return tier if clock is time.monotonic else _ToTier(tier, clock)


def from_machine_time(link: Mailbox, clock: Callable[[], float]) -> Mailbox:
    """Return the mailbox of a link on that clock for its tier."""
    return link if clock is time.monotonic else _ToLink(link, clock)


class _ToTier:
    def __init__(self, tier: Mailbox, clock: Callable[[], float]) -> None:
        self._tier = tier
        self._clock = clock

    def post(self, message: Message) -> bool:
        """Take the message, with its deadline by the machine's clock."""
        if isinstance(message, wire.Probe | wire.LoadJob | wire.StoreJob):
            left_s = message.deadline - self._clock()
            message = replace(message, deadline=time.monotonic() + left_s)
        return self._tier.post(message)


class _ToLink:
    def __init__(self, link: Mailbox, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock

    def post(self, message: Message) -> bool:
        """Take the message, with its time by the engine's clock. Any thread."""
        if isinstance(message, wire.JobEnded) and message.at:
            ago_s = time.monotonic() - message.at
            message = replace(message, at=self._clock() - ago_s)
        return self._link.post(message)
