"""The messages about the life of a tier: what its cell and its host report to its link."""

from __future__ import annotations

from kvtier.core.message import Message
from kvtier.plugin_api.backend import (  # noqa: TC001 - msgspec decodes by them
    BackendTraits,
    Connection,
)


class Counted(Message, frozen=True):
    """What the tier's backend has counted so far in this life of its cell."""

    counters: dict[str, int]


class ConnectionChanged(Message, frozen=True, gc=False):
    """How the tier's backend stands with its server from now on."""

    state: Connection


class TierOpened(Message, frozen=True, gc=False):
    """The tier's backend is open, for the first time: what was sent until now waited for that."""


class TierBroke(Message, frozen=True, gc=False):
    """The tier's actor or its backend's start raised. Nothing more will come."""

    reason: str


class TierNotRun(Message, frozen=True, gc=False):
    """For so long, of late, the tier's process was ready to run and the machine ran others."""

    seconds: float


class TierFenced(Message, frozen=True, gc=False):
    """The tier's cell is gone, threads and all: no slot is touched by it any more."""


class TierRestarted(Message, frozen=True, gc=False):
    """A fresh cell serves the tier; what it knew is forgotten.

    ``traits``: its backend's; None if they are as they were.
    """

    traits: BackendTraits | None = None
