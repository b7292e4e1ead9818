"""Defines the messages that cross between the engine's cell and a tier's, and are encoded for it.

Messages are values: keys, slot numbers, ids, outcomes, times. Never a buffer,
a callback or an object of the sender's, so an actor can move to another process.
They are frozen msgspec structs: cheap to build, and not tracked by the garbage collector.
Units: seconds of the runtime's monotonic clock; slots count from 0; tiers too, in
the order of ``secondary_tiers``; a set of tiers is an int, one bit a tier.

What happens when a mailbox is full
-----------------------------------
Mailboxes within one cell are run to quiescence before the facade's call
returns, so they can't fill up. Between cells:

=====================  ====================================================
message                when the mailbox is full
=====================  ====================================================
Probe                  refused; the tier counts as not having the keys
LoadJob                refused; the promotion fails at once, the slots are free
StoreJob               refused; the blocks are not cascaded, and counted
RequestOpened,         sent again with the next Tick
RequestClosed,
PrefixHits,
BlocksMissing
TouchKeys,             dropped; the tier's eviction order is a little older
RequestEnded, Tick
ProbeAnswer, JobEnded, never refused: at most one for each probe and job in flight
PresenceChanged
TierOpened, TierBroke, never refused: one of each in a tier's life
TierFenced
PolicyBroke, PolicyReturned, Counted, ConnectionChanged
=====================  ====================================================
"""

from __future__ import annotations

import msgspec

from kvtier.plugin_api.backend import (  # noqa: TC001 - msgspec decodes by them
    BackendTraits,
    Connection,
    Outcome,
)
from kvtier.plugin_api.deadlines import NEVER
from kvtier.plugin_api.keys import Key, RequestId  # noqa: TC001 - as above


class Message(msgspec.Struct, frozen=True, gc=False, tag=True, array_like=True):
    """Base of all messages. The class name is sent along when one goes to another process."""


# --- to a tier ---
# Messages with keys carry the mark of their generation, so that no order of messages, and no
# restart, can mix blocks of two generations; and the epoch in which that generation began
# (``since``), since an engine may go back to a generation with a name. ``deadline``: the time after
# which no request waits for the reply. It and ``at`` are converted if the
# engine's clock is not the machine's (``kvtier/hosts/machine_time.py``).


class GenerationBegan(Message, frozen=True, gc=False):
    """The weights have changed as of this epoch: no block from before may be found again.

    Primary tier → links, and each link → its tier. ``mark``: see ``kvtier/core/generations.py``.
    """

    epoch: int
    mark: bytes


class Probe(Message, frozen=True, gc=False):
    """Look these up in the tier. Answered with ProbeAnswer."""

    probe: int
    keys: tuple[Key, ...]
    mark: bytes = b""
    since: int = 0
    request: RequestId = ""  #: as in ProbeKeys
    deadline: float = NEVER


class LoadJob(Message, frozen=True, gc=False):
    """Read these blocks into these slots. Answered with JobEnded."""

    job: int
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    mark: bytes = b""
    since: int = 0
    request: RequestId = ""
    deadline: float = NEVER


class StoreJob(Message, frozen=True, gc=False):
    """Store these blocks of one request, read from these slots. Answered with JobEnded."""

    job: int
    request: RequestId
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    mark: bytes = b""
    since: int = 0
    deadline: float = NEVER


class TouchKeys(Message, frozen=True, gc=False):
    """These blocks were used by ``request``; for a tier that evicts. So is RequestEnded."""

    keys: tuple[Key, ...]
    request: RequestId


class RequestEnded(Message, frozen=True, gc=False):
    """``request`` is over; ``order``: all keys that it used, head to tail, if known."""

    request: RequestId
    order: tuple[Key, ...] | None


class Tick(Message, frozen=True, gc=False):
    """The time is now ``now``."""

    now: float


# --- to a request-scoped tier, which is notified of requests with parameters for it ---


class RequestOpened(Message, frozen=True, gc=False):
    """A request runs that has ``params`` (MessagePack) for request-scoped tiers.

    Sent before all other messages of the request. ``peer``: as in RequestStarted.
    """

    request: RequestId
    params: bytes
    peer: str = ""


class RequestClosed(Message, frozen=True, gc=False):
    """A request that was opened sends nothing more."""

    request: RequestId


class PrefixHits(Message, frozen=True, gc=False):
    """These blocks of the request were in host memory before it. Sent before their StoreJob.

    Only for a tier that wants all blocks of the request.
    """

    request: RequestId
    keys: tuple[Key, ...]


class BlocksMissing(Message, frozen=True, gc=False):
    """These will not be sent for ``request``. Primary tier → link → tier → backend."""

    request: RequestId
    keys: tuple[Key, ...]


# --- from a tier ---


class ProbeAnswer(Message, frozen=True, gc=False):
    """One bool per key, in the order asked."""

    probe: int
    present: tuple[bool, ...]


class JobEnded(Message, frozen=True, gc=False):
    """One outcome per block, in the order of the job. ``seconds``: time at the backend.

    ``at``: when the last block ended, by the monotonic clock of the machine; 0.0: not known.
    """

    job: int
    outcomes: tuple[Outcome, ...]
    seconds: float
    at: float = 0.0


class PresenceChanged(Message, frozen=True, gc=False):
    """Blocks that a tier tracking its contents has gained and lost, in that order.

    Other tiers report blocks that they found to be gone. ``for_room``: others took their place.
    """

    added: tuple[Key, ...]
    removed: tuple[Key, ...]
    since: int = 0
    for_room: bool = False


class BlocksWanted(Message, frozen=True, gc=False):
    """A backend wants these for ``request``, one of its own. Tier → link → primary tier.

    READY blocks are sent as a StoreJob of that request, so that they stay while they are read; the
    others as BlocksMissing. ``since``: the epoch in which the keys' generation began.
    """

    request: RequestId
    keys: tuple[Key, ...]
    since: int = 0
    tier: int = -1  #: the tier's number, set by its link


class Counted(Message, frozen=True):
    """Counters of the tier's backend so far, in this life of its cell, and its gauges."""

    counters: dict[str, int]
    gauges: dict[str, int] = {}


class PolicyBroke(Message, frozen=True, gc=False):
    """The eviction policy failed with ``error``. Answered with Residents, for its replacement."""

    error: str


class PolicyReturned(Message, frozen=True, gc=False):
    """An eviction policy that had lacked memory is back. Answered with Residents, for it."""


# --- about a tier's life, from its cell or its host ---


class ConnectionChanged(Message, frozen=True, gc=False):
    """The connection of the tier's backend to its server has a new state."""

    state: Connection


class TierOpened(Message, frozen=True, gc=False):
    """The tier's backend is open for the first time: messages sent until now waited for that."""


class TierBroke(Message, frozen=True, gc=False):
    """The tier's actor or its backend's start raised. Nothing more will come."""

    reason: str


class TierNotRun(Message, frozen=True, gc=False):
    """The recent time for which the tier's process was runnable but the machine ran others."""

    seconds: float


class TierFenced(Message, frozen=True, gc=False):
    """The tier's cell is gone, with all its threads: it touches no slot any more."""


class TierRestarted(Message, frozen=True, gc=False):
    """A fresh cell serves the tier; the old one's knowledge is lost.

    ``traits``: its backend's; None if they are unchanged.
    """

    traits: BackendTraits | None = None
