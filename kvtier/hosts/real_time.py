"""Times as they cross to tiers whose engine has a clock of its own: that of a replay, or of a test.

A tier works in real time, in whatever thread or process, and its backend counts the time that is
left until a job's deadline on the machine's monotonic clock. An engine counts deadlines on its own
clock. So what crosses is moved by the distance of the two, as it is at that moment: it must not
change while a tier works, which a replay promises (``kvtier/tools/replay/clock.py``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kvtier.core import messages as m
from kvtier.plugin_api.deadlines import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtier.core.actor import Mailbox
    from kvtier.core.messages import Message


class ToRealTime:
    """A tier's mailbox: deadlines of the engine's clock become those of the machine's."""

    def __init__(self, tier: Mailbox, clock: Callable[[], float]) -> None:
        self._tier = tier
        self._clock = clock

    def post(self, message: Message) -> bool:
        """Take the message for the tier."""
        if isinstance(message, m.Probe | m.LoadJob | m.StoreJob) and message.deadline != NEVER:
            real = message.deadline - self._clock() + time.monotonic()
            message = msgspec.structs.replace(message, deadline=real)
        return self._tier.post(message)


class FromRealTime:
    """A link's mailbox: when a job ended by the machine's clock becomes the engine's time."""

    def __init__(self, link: Mailbox, clock: Callable[[], float]) -> None:
        self._link = link
        self._clock = clock

    def post(self, message: Message) -> bool:
        """Take the message for the link. Any thread."""
        if isinstance(message, m.JobEnded) and message.at:
            at = message.at - time.monotonic() + self._clock()
            message = msgspec.structs.replace(message, at=at)
        return self._link.post(message)
