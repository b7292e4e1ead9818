"""Defines the messages about a tier's life that its cell and its host send to its link."""

from __future__ import annotations

from kvtier.core.message import Message
from kvtier.plugin_api.backend import (  # noqa: TC001 - msgspec decodes by them
    BackendTraits,
    Connection,
)


class Counted(Message, frozen=True):
    """Counters of the tier's backend so far, in this life of its cell."""

    counters: dict[str, int]


class ConnectionChanged(Message, frozen=True, gc=False):
    """The connection of the tier's backend to its server has a new state."""

    state: Connection


class TierOpened(Message, frozen=True, gc=False):
    """The tier's backend is open for the first time: messages sent until now waited for that."""


class TierBroke(Message, frozen=True, gc=False):
    """The tier's actor or its backend's start raised. Nothing more will come."""

    reason: str


class TierNotRun(Message, frozen=True, gc=False):
    """For so long, recently, the tier's process was runnable but the machine ran others."""

    seconds: float


class TierFenced(Message, frozen=True, gc=False):
    """The tier's cell is gone, with all its threads: it touches no slot any more."""


class TierRestarted(Message, frozen=True, gc=False):
    """A fresh cell serves the tier; the old one's knowledge is lost.

    ``traits``: its backend's; None if they are unchanged.
    """

    traits: BackendTraits | None = None
