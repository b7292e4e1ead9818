"""Defines the messages about promotions, between the primary tier and a tier's link.

Like those in ``kvtier/core/messages.py``, but they never leave the engine cell.
"""

from __future__ import annotations

from kvtier.core.message import Message
from kvtier.plugin_api.backend import Outcome  # noqa: TC001 - msgspec decodes by it
from kvtier.plugin_api.deadlines import NEVER
from kvtier.plugin_api.keys import Key, RequestId  # noqa: TC001 - as above


class Promote(Message, frozen=True, gc=False):
    """Load these blocks, all for one request, into these slots.

    ``patience_s``: the request computes them instead after so long, or as long as the load should
    take given the tier's other work, if that is no longer than ``patience_max_s``.
    """

    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    epoch: int
    request: RequestId = ""
    patience_s: float = NEVER
    patience_max_s: float = NEVER


class PromotionEnded(Message, frozen=True, gc=False):
    """The outcome of each block. The tier has released all the slots."""

    tier: int
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    epoch: int


class Withdraw(Message, frozen=True, gc=False):
    """This request, or any (None), needs nothing more from tiers.

    Anything not sent yet is not sent: answered with PromotionWithdrawn and ProbesWithdrawn.
    ``unwanted``: keys that it asked tiers for, and that no other request waits for.
    """

    request: RequestId | None
    unwanted: frozenset[Key] = frozenset()


class PromotionWithdrawn(Message, frozen=True, gc=False):
    """These blocks were not requested from the tier. Nothing touches the slots."""

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
    """The outcome of abandoned blocks. The tier has released all the slots."""

    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    epoch: int


class SlotsReleased(Message, frozen=True, gc=False):
    """The tier has released slots that were abandoned earlier."""

    slots: tuple[int, ...]
