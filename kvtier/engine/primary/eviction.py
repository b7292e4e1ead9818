"""Makes room in the primary tier on behalf of one facade call.

The eviction policy is an actor, so a request for victims is a message and its
reply another. The work that needs the room waits here, as a message of its own
(``StoreAfterEviction`` and the like), which the primary tier handles once there is
room, or once it is clear that there won't be more. There is at most one such
message, since the facade's calls are run to quiescence one after the other.

The policy names victims; the head of a running request's prefix is never evicted
while some of its tail can go (``kvtier/engine/primary/running_prefixes.py``).

A policy whose reply names no new block is replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.core import messages as m
from kvtier.core.messages import ReservePrefix  # noqa: TC001 - msgspec decodes by it
from kvtier.core.wire import Message
from kvtier.plugin_api.keys import Key  # noqa: TC001 - as above

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtier.core.actor import Mailbox
    from kvtier.engine.primary.running_prefixes import RunningPrefixes
    from kvtier.engine.primary.slot_table import SlotTable

NAMES_NOTHING: Final = "it names victims that are not there, or that it has named before"


class LookupAfterEviction(Message, frozen=True, gc=False):
    """Primary tier → itself: promote the block that was looked up, if there is a slot now."""

    lookup: m.Lookup


class StoreAfterEviction(Message, frozen=True, gc=False):
    """Primary tier → itself: grant slots to as many of the ``wanted`` keys as there is room for."""

    store: m.PrepareStore
    wanted: list[Key]


class ReserveAfterEviction(Message, frozen=True, gc=False):
    """Primary tier → itself: promote the longest prefix that there is room for."""

    reserve: ReservePrefix


class Eviction:
    """Tracks the current request for victims, and its outcome."""

    def __init__(self, slots: SlotTable, prefixes: RunningPrefixes, policy: Mailbox) -> None:
        self.policy = policy
        self.evicted: list[Key] = []  #: for the message that waits, or was handled last
        self._slots = slots
        self._slot_of: Mapping[Key, int] = slots.slot_of
        self._prefixes = prefixes
        self._waiting: Message | None = None
        self._slots_wanted = 0
        self._victims_asked = 0
        self.excluded: frozenset[Key] = frozenset()  #: must stay
        # Named by the policy, and still here: keys that can't go, and keys that need not go yet.
        self._refused: dict[Key, None] = {}
        self._restorable: dict[Key, None] = {}
        self._is_replaced = False

    @property
    def is_under_way(self) -> bool:
        """Whether a message waits for slots, which keys without one may be about to get."""
        return self._waiting is not None

    def make_room(self, slots: int, then: Message, excluded: frozenset[Key] = frozenset()) -> None:
        """Make room until ``slots`` slots are free (fewer are now); ``then`` is handled next.

        Its handler must check how much room there is. ``excluded``: keys that must stay.
        """
        self.evicted = []
        self._waiting = then
        self._slots_wanted = slots
        self.excluded = excluded
        self._is_replaced = False
        self._ask(slots - self._slots.free_count())

    def evict(self, victims: Sequence[Key]) -> Message | None:
        """Evict the victims that may go; return the message to handle now, None: more are needed.

        Refused: blocks that are held by now, or that a lookup of this step reported readable.
        """
        known = len(self.evicted) + len(self._refused)
        if self._prefixes.begin_eviction(victims):
            self._evict_tails_of(victims)
        else:
            self._evict(victims)
        missing = self._slots_wanted - self._slots.free_count()
        if missing > 0 and len(victims) == self._victims_asked:
            if len(self.evicted) + len(self._refused) > known:
                self._ask(missing)
                return None
            if not self._is_replaced:
                self._is_replaced = True
                self.policy.post(m.ReplacePolicy(error=NAMES_NOTHING))
                self._ask(missing)
                return None
        restored = tuple(key for key in (*self._refused, *self._restorable) if key in self._slot_of)
        if restored:
            self.policy.post(m.Restored(keys=restored))
        self._refused.clear()
        self._restorable.clear()
        then, self._waiting = self._waiting, None
        return then

    def discard(self, keys: Iterable[Key]) -> None:
        """Evict those of the keys that may go now, into ``evicted``."""
        self.evicted = []
        self._evict(keys)
        self._refused.clear()
        if self.evicted:
            self.policy.post(m.Gone(keys=tuple(self.evicted)))

    def _evict(self, victims: Iterable[Key]) -> None:
        """Evict those of the victims that may go."""
        slots, slot_of = self._slots, self._slot_of
        hits = slots.hits
        going: dict[Key, int] = {}
        for key in victims:
            slot = slot_of.get(key)
            if slot is None:
                continue
            if slot in hits or slots.is_held(slot):
                self._refused[key] = None
            else:
                going[key] = slot
        slots.evict(going)
        self.evicted += going

    def _evict_tails_of(self, victims: Sequence[Key]) -> None:
        """Evict a block for each victim that may go: the victim, or the last block behind it."""
        gone = []
        for key in victims:
            if self._can_go(key):
                gone.append(self._evict_behind(key))
            elif key in self._slot_of:
                self._refused[key] = None
        # A block that went in place of a victim may be a victim too: then one went for two.
        while self._restorable and self._slots_wanted > self._slots.free_count():
            gone.append(self._evict_behind(next(iter(self._restorable))))
        named = set(victims)
        unknown = tuple(key for key in gone if key not in named)
        if unknown:
            self.policy.post(m.Gone(keys=unknown))

    def _evict_behind(self, victim: Key) -> Key:
        """Evict the last block behind ``victim``, or the victim; return the evicted block."""
        key = self._prefixes.stand_in(victim, self._can_go)
        self._restorable[victim] = None
        self._restorable.pop(key, None)  # that goes: it may be the victim, or an earlier one
        self._evict((key,))
        return key

    def _can_go(self, key: Key) -> bool:
        slot = self._slot_of.get(key)
        if slot is None or slot in self._slots.hits or key in self.excluded:
            return False
        return not self._slots.is_held(slot)

    def tell_residents(self) -> None:
        """Send a replacement policy all resident keys, and those of them that must stay."""
        slot_of, is_held = self._slot_of, self._slots.is_held
        held = tuple(key for key, slot in slot_of.items() if is_held(slot))
        self.policy.post(m.Residents(keys=tuple(slot_of), held=held))
        self._refused.clear()
        self._restorable.clear()

    def _ask(self, missing: int) -> None:
        self._victims_asked = missing
        self.policy.post(m.ChooseVictims(count=missing, excluded=self.excluded))
