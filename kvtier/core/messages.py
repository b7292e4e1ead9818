"""Defines the messages within a cell: the engine's, and between a cell's tier and its policy.

None of them crosses to another cell (``kvtier/core/wire.py``). Those that the primary tier leaves
for itself while it waits for victims are in ``kvtier/engine/primary/eviction.py``. Mailboxes within
a cell are run to quiescence before the facade's call returns, so they can't fill up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping  # noqa: TC003 - as below
from typing import Final, Literal, NamedTuple, TypeAlias

from kvtier.core.wire import Message
from kvtier.plugin_api.backend import Outcome  # noqa: TC001 - msgspec decodes by it
from kvtier.plugin_api.deadlines import NEVER
from kvtier.plugin_api.keys import Key, RequestId, TierSet  # noqa: TC001 - as above

SPREADS: Final = 3.0
"""Number of spreads beyond the expected time after which a load counts as stalled."""

# --- values ---


class RequestOrder(NamedTuple):
    """A request's keys by token position, from number ``first`` on; earlier ones are known."""

    first: int
    keys: tuple[Key, ...]


class TokenPlace(NamedTuple):
    """Position of a lookup's keys in their request. Tokens before them are on the GPU."""

    first_token: int
    chunk_tokens: int  #: tokens that each key covers


class LoadCost(NamedTuple):
    """An estimate, as a value: how long a load from a tier would take now."""

    latency_s: float
    block_s: float  #: for each block that is outstanding at the tier, its own included
    outstanding: int  #: blocks that the tier has been sent, and has not released
    spread: float  #: its recent error, as a share of the estimate
    may_be_less: bool = False  #: the latest load was far faster; the next ones show if all are

    def seconds(self, blocks: int) -> float:
        """Return the time that a load of ``blocks`` takes, if it is sent now."""
        if not blocks:
            return 0.0
        return self.latency_s + self.block_s * (self.outstanding + blocks)

    def patience_s(self, blocks: int, least_s: float, most_s: float) -> float:
        """Return how long to wait for ``blocks``: until they are stalled, within limits.

        ``least_s`` for blocks that are not expected within ``most_s``.
        """
        expected_s = self.seconds(blocks)
        if expected_s >= most_s:
            return least_s
        return max(least_s, min(expected_s * (1 + SPREADS * self.spread), most_s))


class GroupKeys(NamedTuple):
    """One group's share of the blocks that a request may load, from head to tail."""

    keys: tuple[Key, ...]
    ends: tuple[int, ...]  #: the token that each block ends at, growing
    window: int | None = None  #: how many blocks before a token are needed; None: all of them
    reach: int = 0  #: with a window: at least so many tokens before it are needed
    beyond: int = 0  #: how many blocks behind it are needed, too

    def needed(self, tokens: int) -> tuple[Key, ...] | None:
        """Return the blocks needed for a prefix of ``tokens``; None if there is no such prefix."""
        last = bisect_left(self.ends, tokens)
        if last + self.beyond >= len(self.ends):
            return None
        first = 0
        if self.window is not None:
            first = max(
                0, min(last + 1 - self.window, bisect_right(self.ends, tokens - self.reach))
            )
        return self.keys[first : last + self.beyond + 1]


# --- facade → primary tier: each is handled before the facade's call returns ---


class Lookup(Message, frozen=True, gc=False):
    """Look up this block. The reply is its BlockState."""

    key: Key
    request: RequestId


class LookupPrefix(Message, frozen=True, gc=False):
    """Look up these blocks. The reply has their BlockStates, from the first on.

    It may have fewer: the first ABSENT is the last; a key that needs an eviction must be looked up
    alone.
    With ``place``, the lookup decides how many of the tiers' blocks to load; the rest are ABSENT.
    ``now`` is set with it, since the last Tick may be as old as a step of the engine.
    """

    keys: tuple[Key, ...]
    request: RequestId
    place: TokenPlace | None = None
    now: float = 0.0


class PrepareLoad(Message, frozen=True, gc=False):
    """Pin these READY blocks for the GPU. Answered with their slots.

    ``tokens``: the prompt tokens from the first to before the second are not computed then.
    """

    keys: tuple[Key, ...]
    request: RequestId
    order: RequestOrder | None = None
    tokens: tuple[int, int] | None = None


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
    """The scheduler's step is over: send the collected messages.

    ``ticks``: time passes, too; False: the sender has told all that have anything to do in time.
    """

    now: float
    ticks: bool = True


class PromoteKeys(Message, frozen=True, gc=False):
    """Promote these blocks. Answered with a state for each, None while there is no room for it."""

    keys: tuple[Key, ...]
    request: RequestId


class AskStored(Message, frozen=True, gc=False):
    """Look these up in the tier. The reply: key → True, False, or None while it stores them."""

    keys: tuple[Key, ...]
    tier: int


class Discard(Message, frozen=True, gc=False):
    """These blocks are of no more use here: evict those that may be."""

    keys: tuple[Key, ...]


class LoadSources(Message, frozen=True, gc=False):
    """Get the blocks of this request that tiers delivered. The reply: key → the tier's number."""

    request: RequestId


class AskReport(Message, frozen=True, gc=False):
    """Get the tiers' work for this request. The reply: a ``RequestReport``, or None."""

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


class ChooseVictims(Message, frozen=True, gc=False):
    """Name up to ``count`` keys to evict. Answered with Victims."""

    count: int
    excluded: frozenset[Key]


class Victims(Message, frozen=True, gc=False):
    """The policy has forgotten these keys, tails before heads. If too few: it has no more."""

    keys: tuple[Key, ...]


class Restored(Message, frozen=True, gc=False):
    """These victims were not evicted after all: restore them, first in line for eviction."""

    keys: tuple[Key, ...]


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


class ProbeKeys(Message, frozen=True, gc=False):
    """Look these up in the tier, head to tail. Answered with ProbeEnded, in batches.

    ``request``: the one it is for, if lookups are request-scoped. ``asker``: the first request that
    needs the result. ``in_order``: keys behind a missing one are of no use to it.
    """

    keys: tuple[Key, ...]
    request: RequestId = ""
    asker: RequestId = ""
    in_order: bool = False


class ProbesWithdrawn(Message, frozen=True, gc=False):
    """The tier was not probed for these: no request waits for it. ``request``: as in ProbeKeys."""

    tier: int
    keys: tuple[Key, ...]
    request: RequestId


class ProbeEnded(Message, frozen=True, gc=False):
    """The tier's answer, or its substitute at the deadline. One bool per key."""

    tier: int
    keys: tuple[Key, ...]
    present: tuple[bool, ...]
    request: RequestId = ""


class TierBypassed(Message, frozen=True, gc=False):
    """The link begins or stops sending its tier loads, or stores, whatever the tier's health."""

    stores: bool  #: or loads, with their probes
    is_bypassed: bool


class TierUsable(Message, frozen=True, gc=False):
    """Whether to probe the tier for blocks now, and whether it ``answers`` for those it has."""

    tier: int
    usable: bool
    answers: bool = True


class PresenceLearned(Message, frozen=True, gc=False):
    """The tier is now known to have ``added`` and no longer to have ``removed``.

    ``since``: the epoch in which the generation concerned began. ``for_room``: others took the
    place of those removed.
    """

    tier: int
    added: tuple[Key, ...]
    removed: tuple[Key, ...]
    since: int = 0
    for_room: bool = False


class TierForgotten(Message, frozen=True, gc=False):
    """The tier's contents are unknown from now on: it was restarted."""

    tier: int


class LinkFailed(Message, frozen=True, gc=False):
    """The tier's link broke: the slots the tier is filling will never be reported."""

    tier: int


NoticeLevel: TypeAlias = Literal["info", "warning"]
"""Log level: a warning reports a fault that kvtier copes with; its end is no warning."""


class Notice(Message, frozen=True, gc=False):
    """A line for operators, logged once. Any actor → its cell's log."""

    event: str
    tier: str
    detail: str
    level: NoticeLevel = "warning"
    numbers: Mapping[str, float] = {}


# --- facade → primary tier, of requests ---


class RequestStarted(Message, frozen=True, gc=False):
    """A request begins; only ``tiers`` may be asked for its blocks.

    ``params``: for request-scoped tiers, as MessagePack; if empty, those are not notified.
    ``peer``: the address of the engine that it loads from, if it names one.
    """

    request: RequestId
    tiers: TierSet
    params: bytes = b""
    peer: str = ""


class RequestFinished(Message, frozen=True, gc=False):
    """A request is over. ``order``: all its keys, head to tail, if known."""

    request: RequestId
    order: tuple[Key, ...] | None


class RequestsScheduled(Message, frozen=True, gc=False):
    """The loads of these requests are decided: they wait for nothing any more."""

    requests: tuple[RequestId, ...]


class StepComputed(Message, frozen=True, gc=False):
    """Facade → primary tier: prompt tokens that a step computed, and the time since the last step.

    ``attention``: the sum, over requests, of ``n² + 2 n c`` for ``n`` tokens behind ``c``.
    ``seconds``: None if the engine had nothing to compute for some of the time.
    """

    tokens: int
    attention: int
    seconds: float | None


class Survey(Lookup, frozen=True, gc=False):
    """Look up this block: FILLING if a tier has it; the lookup alone does not promote it."""


class ReservePrefix(Message, frozen=True, gc=False):
    """Promote the blocks of the longest prefix that has room. Answered with its tokens, or 0."""

    groups: tuple[GroupKeys, ...]
    request: RequestId
    first_token: int | None = None  #: those before it the GPU has; None: whatever tiers have counts
    now: float = 0.0  #: set with ``first_token``


# --- promotions: primary tier ↔ tier link ---


class Promote(Message, frozen=True, gc=False):
    """Load these blocks, all for one request, into these slots.

    ``patience_s``: time after which the request computes them instead; or the time that the load
    should take given the tier's other work, if that is at most ``patience_max_s``.
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

    Unsent work is dropped: answered with PromotionWithdrawn and ProbesWithdrawn. ``unwanted``: keys
    that it requested from tiers, and that no other request waits for.
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


class LoadCostLearned(Message, frozen=True, gc=False):
    """Link → primary tier: how long a load from the tier takes now; None: not known."""

    tier: int
    cost: LoadCost | None


# --- cascades: primary tier, admission gate and tier link ---


class Cascade(Message, frozen=True, gc=False):
    """Store these blocks, which are pinned once for this tier, from these slots.

    ``is_admitted``: the tier's admission policy has already decided.
    """

    request: RequestId
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    epoch: int
    is_admitted: bool = False

    def part(self, start: int, stop: int | None = None) -> Cascade:
        """Return a cascade of some of the blocks."""
        where = slice(start, stop)
        return Cascade(
            self.request, self.keys[where], self.slots[where], self.epoch, self.is_admitted
        )


class CascadeRefused(Message, frozen=True, gc=False):
    """The tier's admission policy doesn't want these blocks of a Cascade."""

    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    epoch: int


class NotAdmitted(Message, frozen=True, gc=False):
    """The tier's admission policy has refused these blocks."""

    tier: int
    keys: tuple[Key, ...]


class CascadeWanted(Message, frozen=True, gc=False):
    """The tier's admission policy wants these now; ``request`` used them. They may be gone."""

    tier: int
    keys: tuple[Key, ...]
    request: RequestId


class CascadeEnded(Message, frozen=True, gc=False):
    """The tier no longer reads these slots."""

    tier: int
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    epoch: int


class CascadeDeferred(Message, frozen=True, gc=False):
    """The tier does not have these blocks, and no longer reads the slots: offer them again."""

    tier: int
    request: RequestId
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    epoch: int


class StoresWanted(Message, frozen=True, gc=False):
    """The tier has room for this many deferred blocks. Answered with StoresOffered."""

    tier: int
    blocks: int


class StoresOffered(Message, frozen=True, gc=False):
    """The deferred blocks are on their way, as Cascades; ``is_all``: there are no more to request.

    ``lost``: deferred blocks that follow one that is lost.
    """

    is_all: bool
    lost: int


class TierIsBounded(Message, frozen=True, gc=False):
    """The tier evicts by itself, and holds this many blocks. Link → primary tier."""

    tier: int
    capacity_blocks: int


class StoresLost(Message, frozen=True, gc=False):
    """This many deferred blocks have left host memory. Primary tier → link."""

    blocks: int


class TierIsRequestScoped(Message, frozen=True, gc=False):
    """The tier serves only requests that have parameters for it. Link → primary tier."""

    tier: int
