"""Makes room in the primary tier on behalf of one facade call.

The eviction policy is an actor, so asking it for victims is a message and its
answer another: the call is put aside in between, and handled again once there
is room, or once it is clear that there won't be more. There is at most one
such call, since the facade's calls are run to quiescence one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier import messages as m
from kvtier.group_messages import ReservePrefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.actor import Mailbox
    from kvtier.messages import Key
    from kvtier.slots import SlotTable

Call = m.Lookup | m.PrepareStore | ReservePrefix


class Eviction:
    """What was asked of the policy, and what became of it."""

    def __init__(self, slots: SlotTable, slot_of: dict[Key, int]) -> None:
        self.policy: Mailbox
        self.evicted: list[Key] = []  #: for the call at hand
        self._slots = slots
        self._slot_of = slot_of
        self._aside: Call | None = None
        self._resumed: Call | None = None
        self._slots_wanted = 0
        self._victims_asked = 0
        self._spare: frozenset[Key] = frozenset()
        self._refused: list[Key] = []

    def make_room(self, call: Call, slots: int, spare: frozenset[Key] = frozenset()) -> bool:
        """Return False if ``call`` is put aside until victims are named.

        It is then handled again, and gets True: it must look how much room
        there is. ``spare``: keys that must stay.
        """
        if call is self._resumed:
            return True
        self.evicted = []
        missing = slots - self._slots.free_count()
        if missing <= 0:
            return True
        self._aside = call
        self._slots_wanted = slots
        self._spare = spare
        self._ask(missing)
        return False

    def was_resumed(self, call: Call) -> bool:
        """Tell whether this is the second time that ``call`` is handled."""
        return call is self._resumed

    def evict(self, victims: Sequence[Key]) -> Call | None:
        """Evict what may go; return the call to handle again, None if more victims were asked for.

        Refused: what is held by now, and what a lookup of this step called readable.
        """
        slots, slot_of = self._slots, self._slot_of
        hits = slots.hits
        going = []
        for key in victims:
            slot = slot_of.get(key)
            if slot is None:
                continue
            if slot in hits or slots.is_held(slot):
                self._refused.append(key)
            else:
                del slot_of[key]
                going.append(slot)
                self.evicted.append(key)
        slots.evict(going)
        missing = self._slots_wanted - slots.free_count()
        if missing > 0 and len(victims) == self._victims_asked:
            self._ask(missing)
            return None
        if self._refused:
            self.policy.post(m.Spared(keys=tuple(self._refused)))
            self._refused = []
        self._resumed, self._aside = self._aside, None
        return self._resumed

    def end_call(self) -> None:
        """Note that the call was handled again."""
        self._resumed = None

    def tell_residents(self) -> None:
        """Tell a policy that takes another one's place what there is, and what of it must stay."""
        slot_of, is_held = self._slot_of, self._slots.is_held
        held = tuple(key for key, slot in slot_of.items() if is_held(slot))
        self.policy.post(m.Residents(keys=tuple(slot_of), held=held))

    def _ask(self, missing: int) -> None:
        self._victims_asked = missing
        self.policy.post(m.ChooseVictims(count=missing, spare=self._spare))
