"""The messages about promotions, between the primary tier and a tier's link.

As those in ``kvtier/core/messages.py``; they never leave the engine cell.
"""

from __future__ import annotations

from kvtier.core.message import Message
from kvtier.plugin_api.backend import Outcome  # noqa: TC001 - msgspec decodes by it
from kvtier.plugin_api.deadlines import NEVER
from kvtier.plugin_api.keys import Key, RequestId  # noqa: TC001 - as above


class Promote(Message, frozen=True, gc=False):
    """Load these blocks, all for one request, into these slots.

    ``patience_s``: after so long the request computes them instead, or as long as the load should
    take by what else the tier has to do, if that is no longer than ``patience_max_s``.
    """

    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    epoch: int
    request: RequestId = ""
    patience_s: float = NEVER
    patience_max_s: float = NEVER


class PromotionEnded(Message, frozen=True, gc=False):
    """What became of each block. The tier has released all the slots."""

    tier: int
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    epoch: int


class Withdraw(Message, frozen=True, gc=False):
    """What this request, or any (None), wanted of tiers is of no use to it any more.

    What is not sent yet is not sent: answered with PromotionWithdrawn and ProbesWithdrawn.
    ``unwanted``: keys that it asked tiers for, and that nobody else waits to hear of.
    """

    request: RequestId | None
    unwanted: frozenset[Key] = frozenset()


class PromotionWithdrawn(Message, frozen=True, gc=False):
    """These blocks were not asked of the tier. Nothing touches the slots."""

    tier: int
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    epoch: int


class PromotionAbandoned(Message, frozen=True, gc=False):
    """The tier is late, or the request's patience is over. The tier may still write the slots."""

    tier: int
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    epoch: int


class PromotionLate(Message, frozen=True, gc=False):
    """What became of blocks that were abandoned. The tier has released all the slots."""

    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    epoch: int


class SlotsReleased(Message, frozen=True, gc=False):
    """The tier has released slots that were abandoned earlier."""

    slots: tuple[int, ...]
