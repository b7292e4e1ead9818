"""Defines the host of a tier's cell, as the engine's side sees it: ``kvtier/hosts`` has two."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.core.wire import Message
    from kvtier.plugin_api.backend import BackendTraits

ABANDON_S: Final = 1.0
"""Time reserved at the end of closing, after running work is abandoned."""


class TierHost(Protocol):
    """Runs a tier's cell, as the engine's side sees it. It is the cell's mailbox too.

    All methods belong to the thread that calls the facade, except ``post``, which
    a host may allow to others.
    """

    name: str

    @property
    def traits(self) -> BackendTraits | None:
        """The backend's traits; None while there is no backend yet."""

    @property
    def place(self) -> str | None:
        """The backend's place."""

    def report_losses_by(self, lost_blocks: Callable[[], Mapping[str, int]]) -> None:
        """Set what counts the lost blocks, for the line that the tier is back. Before ``start``."""

    def start(self) -> None:
        """Begin to open the backend and to deliver messages. Does not wait for that.

        Without a backend: notify the link, and try to make one until that works.
        """

    def post(self, message: Message) -> bool:
        """Take a message for the tier's actor; it is delivered after the next ``wake``.

        Return False if too many wait, or the cell is ending or disabled.
        """

    def wake(self) -> None:
        """Deliver the posted messages. Never waits; called once a step."""

    def poll(self) -> None:
        """Pass the tier's messages to the link, if they don't arrive by themselves. Never waits."""

    def ask_to_end(self) -> None:
        """Accept no more messages, end the running work, then end. Returns at once."""

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for a tier that was told to end.

        Return False if a thread of the tier may still touch the slots: they must stay mapped.
        """

    def give_up(self) -> None:
        """Release what was begun, ended or not. Returns at once."""

    def close(self, timeout_s: float) -> bool:
        """Close this tier as ``close_tiers`` does."""
        return close_tiers((self,), timeout_s)[0]


def close_tiers(tiers: Sequence[TierHost], timeout_s: float) -> list[bool]:
    """End tiers side by side, within ``timeout_s``. Return whether each of them has ended.

    Running work may take all of the time except the last ``ABANDON_S``, or the last half if that is
    shorter, so that every tier has its share; then it is abandoned.
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
