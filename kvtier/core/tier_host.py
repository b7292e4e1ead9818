"""What runs a tier's cell, as the engine's side sees it: ``kvtier/hosts`` has two kinds."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.messages import Message
    from kvtier.plugin_api.backend import BackendTraits

ABANDON_S: Final = 1.0
"""Of the time for closing: what is left when what still runs is given up."""


class TierHost(Protocol):
    """What runs a tier's cell, as the engine's side sees it. It is the cell's mailbox too.

    All methods belong to the thread that calls the facade, but ``post``, which
    a host may allow to others.
    """

    name: str

    @property
    def traits(self) -> BackendTraits | None:
        """The backend's; None while there is none yet."""

    @property
    def place(self) -> str | None:
        """The backend's."""

    def start(self) -> None:
        """Have the backend opened and messages delivered. Nothing here waits for that.

        Without a backend: tell the link so, and try to make one until that works.
        """

    def post(self, message: Message) -> bool:
        """Take a message for the tier's actor; it is delivered after the next ``wake``.

        False: too many wait, or the cell is ending or disabled.
        """

    def wake(self) -> None:
        """Have what was posted delivered. Never waits; done once a step."""

    def poll(self) -> None:
        """Hand the link what the tier has sent, if that doesn't come by itself. Never waits."""

    def ask_to_end(self) -> None:
        """Take nothing more, end what was begun, then end. Returns at once."""

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Wait so long, at most, for a tier that was asked to end.

        False: a thread of the tier may still touch the slots, whose memory must stay mapped.
        """

    def give_up(self) -> None:
        """Release what was begun, ended or not. Returns at once."""

    def close(self, timeout_s: float) -> bool:
        """Do ``close_tiers`` for this one."""
        return close_tiers((self,), timeout_s)[0]


def close_tiers(tiers: Sequence[TierHost], timeout_s: float) -> list[bool]:
    """End tiers side by side, within ``timeout_s``. Returns whether each of them has ended.

    What was begun may take all of the time but the last ``ABANDON_S``, or the last half of it,
    which no tier can take from another; then it is given up.
    """
    deadline_s = time.monotonic() + timeout_s
    for tier in tiers:
        tier.ask_to_end()
    ended = _wait_for(tiers, deadline_s - min(ABANDON_S, timeout_s / 2))
    late = [tier for tier, has_ended in zip(tiers, ended, strict=True) if not has_ended]
    for tier in late:
        tier.give_up()
    ended_late = iter(_wait_for(late, deadline_s))
    return [has_ended or next(ended_late) for has_ended in ended]


def _wait_for(tiers: Sequence[TierHost], until_s: float) -> list[bool]:
    return [tier.wait_until_ended(max(0.0, until_s - time.monotonic())) for tier in tiers]
