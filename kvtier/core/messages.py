"""Defines every message that one actor sends another, and what a full mailbox does with it.

(Except those between a tier and its backend's driver: ``kvtier/core/driver_messages.py``; about
requests: ``kvtier/core/request_messages.py``; about promotions:
``kvtier/core/promotion_messages.py``; about cascades: ``kvtier/core/cascade_messages.py``; about
the cost of loads: ``kvtier/core/load_messages.py``; about a tier's life:
``kvtier/core/life_messages.py``; those that the primary tier leaves for itself while it waits for
victims: ``kvtier/engine/primary/eviction.py``.)

Messages are values: keys, slot numbers, ids, outcomes, times. Never a buffer,
a callback or an object of the sender's, so an actor can move to another process.
They are frozen msgspec structs: cheap to build, and not tracked by the garbage collector.
Units: seconds of the runtime's monotonic clock; slots count from 0; tiers too, in
the order of ``secondary_tiers``; a set of tiers is an int, one bit a tier.

What happens when a mailbox is full
-----------------------------------
Mailboxes inside one cell are run to quiescence before the facade's call
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

from typing import Literal, TypeAlias

from kvtier.core.cascade_messages import Cascade as Cascade
from kvtier.core.cascade_messages import CascadeDeferred as CascadeDeferred
from kvtier.core.cascade_messages import CascadeEnded as CascadeEnded
from kvtier.core.cascade_messages import CascadeRefused as CascadeRefused
from kvtier.core.cascade_messages import CascadeWanted as CascadeWanted
from kvtier.core.cascade_messages import StoresOffered as StoresOffered
from kvtier.core.cascade_messages import StoresWanted as StoresWanted
from kvtier.core.driver_messages import AnnounceContents as AnnounceContents
from kvtier.core.driver_messages import BatchEnded as BatchEnded
from kvtier.core.driver_messages import ContentsAnnounced as ContentsAnnounced
from kvtier.core.driver_messages import ContentsFound as ContentsFound
from kvtier.core.driver_messages import ContentsLost as ContentsLost
from kvtier.core.driver_messages import LoadBatch as LoadBatch
from kvtier.core.driver_messages import ProbeBatch as ProbeBatch
from kvtier.core.driver_messages import RemoveBatch as RemoveBatch
from kvtier.core.driver_messages import StoreBatch as StoreBatch
from kvtier.core.life_messages import ConnectionChanged as ConnectionChanged
from kvtier.core.life_messages import Counted as Counted
from kvtier.core.life_messages import TierBroke as TierBroke
from kvtier.core.life_messages import TierFenced as TierFenced
from kvtier.core.life_messages import TierNotRun as TierNotRun
from kvtier.core.life_messages import TierOpened as TierOpened
from kvtier.core.life_messages import TierRestarted as TierRestarted
from kvtier.core.load_messages import LoadCostLearned as LoadCostLearned
from kvtier.core.load_messages import StepComputed as StepComputed
from kvtier.core.load_messages import TokenPlace  # noqa: TC001 - msgspec decodes by it
from kvtier.core.message import Message as Message
from kvtier.core.message import RequestOrder as RequestOrder
from kvtier.core.promotion_messages import Promote as Promote
from kvtier.core.promotion_messages import PromotionAbandoned as PromotionAbandoned
from kvtier.core.promotion_messages import PromotionEnded as PromotionEnded
from kvtier.core.promotion_messages import PromotionLate as PromotionLate
from kvtier.core.promotion_messages import PromotionWithdrawn as PromotionWithdrawn
from kvtier.core.promotion_messages import SlotsReleased as SlotsReleased
from kvtier.core.promotion_messages import Withdraw as Withdraw
from kvtier.core.request_messages import BlocksMissing as BlocksMissing
from kvtier.core.request_messages import BlocksWanted as BlocksWanted
from kvtier.core.request_messages import PrefixHits as PrefixHits
from kvtier.core.request_messages import RequestClosed as RequestClosed
from kvtier.core.request_messages import RequestFinished as RequestFinished
from kvtier.core.request_messages import RequestOpened as RequestOpened
from kvtier.core.request_messages import RequestsScheduled as RequestsScheduled
from kvtier.core.request_messages import RequestStarted as RequestStarted
from kvtier.core.request_messages import TierIsRequestScoped as TierIsRequestScoped
from kvtier.plugin_api.backend import Outcome  # noqa: TC001 - msgspec decodes by it
from kvtier.plugin_api.deadlines import NEVER
from kvtier.plugin_api.keys import Key, RequestId  # noqa: TC001 - as above

# --- facade → primary tier: each is handled before the facade's call returns ---


class Lookup(Message, frozen=True, gc=False):
    """Where is this block? Answered with a BlockState."""

    key: Key
    request: RequestId


class LookupPrefix(Message, frozen=True, gc=False):
    """Where are these blocks? Answered with their BlockStates, from the first on.

    Maybe fewer: the first ABSENT is the last; a key that needs an eviction must be looked up alone.
    With ``place``, the lookup decides how many of the tiers' blocks to load; the rest are ABSENT.
    ``now`` is set with it: the last Tick may be as old as a step of the engine.
    """

    keys: tuple[Key, ...]
    request: RequestId
    place: TokenPlace | None = None
    now: float = 0.0


class PrepareLoad(Message, frozen=True, gc=False):
    """Pin these READY blocks for the GPU. Answered with their slots."""

    keys: tuple[Key, ...]
    request: RequestId
    order: RequestOrder | None = None


class CompleteLoad(Message, frozen=True, gc=False):
    """The GPU has read these blocks, prepared in that epoch."""

    keys: tuple[Key, ...]
    request: RequestId
    epoch: int


class PrepareStore(Message, frozen=True, gc=False):
    """The GPU wants to store these. Answered with a grant, or None for no room."""

    keys: tuple[Key, ...]
    request: RequestId
    cuts: tuple[int, ...] | None = None  #: how many keys may be stored without the rest; None: any,
    #: and each is only useful with all before it
    order: RequestOrder | None = None


class StoreGrant(Message, frozen=True):
    """These keys get these slots; ``evicted`` made room. ``epoch`` goes with the completion."""

    keys: list[Key]
    slots: list[int]
    evicted: list[Key]
    epoch: int


class CompleteStore(Message, frozen=True, gc=False):
    """The GPU has written these blocks, granted in that epoch, or failed to."""

    keys: tuple[Key, ...]
    request: RequestId
    success: bool
    epoch: int
    kept: tuple[Key, ...] = ()  #: those of ``keys`` that must not go to any tier


class Touch(Message, frozen=True, gc=False):
    """These blocks were used, though perhaps not read from here."""

    keys: tuple[Key, ...]
    request: RequestId


class StepEnd(Message, frozen=True, gc=False):
    """The scheduler's step is over: send the collected messages."""

    now: float


class Tick(Message, frozen=True, gc=False):
    """The time is now ``now``."""

    now: float


class LoadSources(Message, frozen=True, gc=False):
    """Which blocks of this request did tiers deliver? Answered with key → the tier's number."""

    request: RequestId


class Reset(Message, frozen=True, gc=False):
    """Forget every block of the primary tier, and begin a new epoch.

    ``mark``: of the generation that begins with it; None: the weights are unchanged.
    """

    mark: bytes | None = None


class ResetFlushed(Message, frozen=True, gc=False):
    """The GPU has released every slot it was given before the last reset."""


# --- primary tier ↔ eviction policy; the same between a secondary tier and its own ---


class Admitted(Message, frozen=True, gc=False):
    """These keys are resident now, written by ``request``; ``held``: not evictable yet."""

    keys: tuple[Key, ...]
    request: RequestId
    held: bool


class Touched(Message, frozen=True, gc=False):
    """These resident keys were used by ``request``, given from head to tail.

    ``held``: they also must not be chosen until Unheld.
    """

    keys: tuple[Key, ...]
    request: RequestId
    held: bool = False


class Held(Message, frozen=True, gc=False):
    """These keys must not be chosen until Unheld (pinned or leased)."""

    keys: tuple[Key, ...]


class Unheld(Message, frozen=True, gc=False):
    """These keys may be chosen again."""

    keys: tuple[Key, ...]


class Gone(Message, frozen=True, gc=False):
    """These keys are no longer resident, for a reason other than being chosen."""

    keys: tuple[Key, ...]


class RequestEnded(Message, frozen=True, gc=False):
    """``request`` is over; ``order``: all keys that it used, head to tail, if known."""

    request: RequestId
    order: tuple[Key, ...] | None


class ChooseVictims(Message, frozen=True, gc=False):
    """Name up to ``count`` keys to evict. Answered with Victims."""

    count: int
    excluded: frozenset[Key]


class Victims(Message, frozen=True, gc=False):
    """The policy has forgotten these keys, tails before heads. Fewer than asked: it has no more."""

    keys: tuple[Key, ...]


class Restored(Message, frozen=True, gc=False):
    """These victims were not evicted after all: restore them, first in line for eviction."""

    keys: tuple[Key, ...]


class PolicyBroke(Message, frozen=True, gc=False):
    """The eviction policy failed with ``error``. Answered with Residents, for its replacement."""

    error: str


class PolicyReturned(Message, frozen=True, gc=False):
    """An eviction policy that had lacked memory is back. Answered with Residents, for it."""


class ReplacePolicy(Message, frozen=True, gc=False):
    """The victims that the eviction policy names are unusable. Answered with PolicyBroke."""

    error: str


class Residents(Message, frozen=True, gc=False):
    """All resident keys, and those of them that are held."""

    keys: tuple[Key, ...]
    held: tuple[Key, ...]


class Cleared(Message, frozen=True, gc=False):
    """Everything is gone."""


# --- primary tier ↔ tier link ---


class GenerationBegan(Message, frozen=True, gc=False):
    """The weights have changed as of this epoch: no block from before may be found again.

    Primary tier → links, and each link → its tier. ``mark``: see ``kvtier/core/generations.py``.
    """

    epoch: int
    mark: bytes


class ProbeKeys(Message, frozen=True, gc=False):
    """Look up whether the tier has these, head to tail. Answered with ProbeEnded, in batches.

    ``request``: the one it is for, if lookups are request-scoped. ``asker``: the
    one that asked first. ``in_order``: no key is of use to it behind a missing one.
    """

    keys: tuple[Key, ...]
    request: RequestId = ""
    asker: RequestId = ""
    in_order: bool = False


class ProbesWithdrawn(Message, frozen=True, gc=False):
    """The tier was not probed for these: no request waited for the answer any more."""

    tier: int
    keys: tuple[Key, ...]


class ProbeEnded(Message, frozen=True, gc=False):
    """The tier's answer, or its substitute at the deadline. One bool per key."""

    tier: int
    keys: tuple[Key, ...]
    present: tuple[bool, ...]
    request: RequestId = ""


class TierUsable(Message, frozen=True, gc=False):
    """Whether to probe the tier for blocks now, and whether it ``answers`` if it has one."""

    tier: int
    usable: bool
    answers: bool = True


class PresenceLearned(Message, frozen=True, gc=False):
    """The tier is now known to have ``added`` and no longer to have ``removed``.

    ``since``: the epoch in which the generation concerned began.
    """

    tier: int
    added: tuple[Key, ...]
    removed: tuple[Key, ...]
    since: int = 0


class TierForgotten(Message, frozen=True, gc=False):
    """The tier's contents are unknown from now on: it was restarted."""

    tier: int


class LinkFailed(Message, frozen=True, gc=False):
    """The tier's link broke: the slots the tier is filling will never be reported."""

    tier: int


NoticeLevel: TypeAlias = Literal["info", "warning"]
"""Log level: a warning reports a fault that kvtier copes with, or the end of one."""


class Notice(Message, frozen=True, gc=False):
    """Something an operator should read, once. Any actor → its cell's log."""

    event: str
    tier: str
    detail: str
    level: NoticeLevel = "warning"


# --- tier link ↔ secondary tier, from cell to cell ---
#
# Whatever names blocks carries the mark of their generation, so that no order of
# messages, and no restart, can make the blocks of one generation those of another; and the
# epoch in which that generation began (``since``): an engine may go back to one that has a name.
# ``deadline``: when no request waits for the answer any more. It and ``at`` are converted if the
# engine's clock is not the machine's (``kvtier/hosts/machine_time.py``).


class Probe(Message, frozen=True, gc=False):
    """Look up whether the tier has these. Answered with ProbeAnswer."""

    probe: int
    keys: tuple[Key, ...]
    mark: bytes = b""
    since: int = 0
    request: RequestId = ""  #: as in ProbeKeys
    deadline: float = NEVER


class ProbeAnswer(Message, frozen=True, gc=False):
    """One bool per key, in the order asked."""

    probe: int
    present: tuple[bool, ...]


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


class JobEnded(Message, frozen=True, gc=False):
    """One outcome per block, in the order of the job. ``seconds``: time at the backend.

    ``at``: when the last block ended, by the monotonic clock of the machine; 0.0: not known.
    """

    job: int
    outcomes: tuple[Outcome, ...]
    seconds: float
    at: float = 0.0


class TouchKeys(Message, frozen=True, gc=False):
    """These blocks were used by ``request``; for a tier that evicts. So is RequestEnded."""

    keys: tuple[Key, ...]
    request: RequestId


class PresenceChanged(Message, frozen=True, gc=False):
    """Blocks that a tier tracking its contents has gained and lost, in that order.

    Other tiers report blocks that they found to be gone.
    """

    added: tuple[Key, ...]
    removed: tuple[Key, ...]
    since: int = 0
