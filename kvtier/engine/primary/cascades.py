"""Decides which blocks of the primary tier are cascaded to which tiers.

A block that the GPU stored is cascaded to every tier that is written to, unless
the tier's admission policy (``kvtier/policies/admission/``) refuses it. A tier that wants whole
requests (vLLM's request-level policy) is also given the blocks that were here already;
those still being filled are parked and follow once they are READY. Kept blocks are never given to
a tier.

A hole of a tier is a block that it could not take yet, or that it will not get. A tier that writes
slowly, is full or fails for a while takes some blocks later than they come, or never. A block that
it could not take is deferred: it stays in host memory for as long as the policy there keeps it, and
is offered again when the tier has room, heads before tails. A block is of no use in a tier without
the one before it in its request. So a block that follows a deferred one is deferred too, and a
block that follows a lost one is not written: no lookup could find it.

A block is lost if it left host memory before the tier had room for it, or never got a slot there.
It stops being a hole once it is sent to the tier, or once the tier is known to have it.

# Invariant: no block is sent to a tier while the one before it in its request is a hole there.
#            Checked: fill, p18_nothing_is_sent_to_a_tier_behind_a_hole.
# Invariant: a deferred block is in host memory, READY. Checked: send_deferred, foresee.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvtier.core import messages as m
from kvtier.plugin_api.keys import forget_oldest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvtier.core.actor import Mailbox
    from kvtier.engine.primary.promotions import Batch
    from kvtier.engine.primary.running_prefixes import RunningPrefixes
    from kvtier.engine.primary.slot_table import SlotTable
    from kvtier.engine.primary.tier_directory import TierDirectory
    from kvtier.plugin_api.keys import Key, RequestId, TierSet
    from kvtier.settings.runtime_config import TierConfig


class Cascades:
    """Picks blocks, pins their slots and sends them; the primary tier is notified of their end."""

    def __init__(
        self,
        slots: SlotTable,
        tiers: Sequence[TierConfig],
        gates: Sequence[Mailbox],
        prefixes: RunningPrefixes,
        directory: TierDirectory,
    ) -> None:
        """``gates``: each tier's admission gate, or its link if it has none."""
        written = {number: tier for number, tier in enumerate(tiers) if not tier.read_only}
        self.all_tiers: TierSet = (1 << len(tiers)) - 1  #: those not cut off
        self.takers: TierSet = sum(1 << number for number in written)  #: those written to
        self._whole_requests: TierSet = sum(
            1 << number for number, tier in written.items() if tier.request_level
        )
        self._tier_count = len(tiers)
        self._slots = slots
        self.parked: dict[Key, TierSet] = {}  #: not READY yet; the tiers they then go to
        self._gates = gates
        self._kept: set[Key] = set()  # in host memory; never sent to a tier
        self._prefixes = prefixes
        self._are_chains = True  # a block is useful only with all before it in its request
        self.holes = {  #: of the tiers that may have some
            number: MissingPrefixes(slots.count, partial(directory.knows, tier=number))
            for number in written
        }

    def send(self, batches: Mapping[int, Batch], request: RequestId, epoch: int) -> None:
        """Send blocks, pinned once for each tier that is to store them.

        Those behind a hole of a tier are deferred.
        """
        for tier, batch in batches.items():
            wanted = self._without_kept(batch) if self._kept else batch
            keys, slots = self._in_front_of_holes(tier, wanted, request)
            if keys:
                self._slots.pin(slots)
                self._gates[tier].post(m.Cascade(request, tuple(keys), tuple(slots), epoch))

    def keep(self, keys: Iterable[Key]) -> None:
        """Never send these blocks to a tier while they are in host memory."""
        self._kept.update(keys)

    def _without_kept(self, batch: Batch) -> Batch:
        rows = [row for row in zip(*batch, strict=True) if row[0] not in self._kept]
        return [key for key, _ in rows], [slot for _, slot in rows]

    def _in_front_of_holes(self, tier: int, batch: Batch, request: RequestId) -> Batch:
        holes = self.holes.get(tier)
        if not holes:  # the usual case
            return batch
        kept: Batch = ([], [])
        rows = list(zip(*batch, self._before(request, batch[0]), strict=True))
        if self._are_chains:  # a hole that is filled now does not stop the blocks behind it
            rows = self._prefixes.from_head_to_tail(request, rows)
        for key, slot, before in rows:
            if holes.includes(before):
                holes.defer(key, DeferredBlock(request, before, is_admitted=False))
            else:
                holes.fill(key, before)
                kept[0].append(key)
                kept[1].append(slot)
        return kept

    def defer(self, message: m.CascadeDeferred) -> None:
        """Defer blocks until the tier has room for them."""
        keys, holes = message.keys, self.holes.get(message.tier)
        if holes is not None:
            for key, before in zip(keys, self._before(message.request, keys), strict=True):
                holes.defer(key, DeferredBlock(message.request, before, is_admitted=True))

    def send_deferred(self, message: m.StoresWanted, epoch: int) -> tuple[list[Key], int]:
        """Send deferred blocks the tier has room for; return their keys, and the number lost."""
        holes = self.holes.get(message.tier)
        if holes is None:
            return [], 0
        now, lost = holes.pop(message.blocks)
        batches: dict[tuple[RequestId, bool], list[Key]] = {}
        for key, block in now.items():
            batches.setdefault((block.request, block.is_admitted), []).append(key)
        for (request, is_admitted), keys in batches.items():
            slots = tuple(self._slots.slot_of[key] for key in keys)
            assert self._slots.are_ready(slots), "a deferred block is not READY"
            self._slots.pin(slots)
            self._gates[message.tier].post(
                m.Cascade(request, tuple(keys), slots, epoch, is_admitted)
            )
        return [*now], lost

    def _before(self, request: RequestId, keys: Sequence[Key]) -> list[Key | None]:
        if self._are_chains:
            return self._prefixes.before(request, keys)
        return [None] * len(keys)

    def note_windows(self) -> None:
        """Note that a block may be useful without those before it: none counts as behind a hole."""
        self._are_chains = False

    def lose(self, keys: Sequence[Key]) -> None:
        """Note that no tier will get these blocks from here."""
        for holes in self.holes.values():
            holes.lose(keys)

    def leave(self, keys: Sequence[Key]) -> dict[int, int]:
        """Note that blocks have left host memory. Return how many of them each tier has lost."""
        if self._kept:
            self._kept.difference_update(keys)
        return {tier: holes.leave(keys) for tier, holes in self.holes.items() if holes}

    def deferred_of(self, request: RequestId) -> int:
        """Return the most deferred blocks of a request at one tier, which has none behind them."""
        if not self._are_chains:
            return 0
        return max((holes.deferred_of(request) for holes in self.holes.values()), default=0)

    def _is_ready(self, key: Key) -> bool:
        slot = self._slots.slot_of.get(key)
        return slot is not None and self._slots.is_ready(slot)

    def of_ready(self, keys: Sequence[Key], slots: Sequence[int], to: TierSet) -> dict[int, Batch]:
        """Return each tier's batch of blocks just READY: all if in ``to``, else those parked."""
        if not self.parked:
            whole = (list(keys), list(slots))
            return {n: whole for n in range(self._tier_count) if to & self.takers & 1 << n}
        batches: dict[int, Batch] = {}
        for key, slot in zip(keys, slots, strict=True):
            tiers = (self.parked.pop(key, 0) | to) & self.takers
            for tier in range(self._tier_count):
                if tiers >> tier & 1:
                    batch = batches.setdefault(tier, ([], []))
                    batch[0].append(key)
                    batch[1].append(slot)
        return batches

    def of_offered(self, keys: Iterable[Key]) -> dict[int, Batch]:
        """Return the blocks already here, as a batch for each tier that wants whole requests."""
        if not self._whole_requests:
            return {}
        ready: Batch = ([], [])
        for key in keys:
            slot = self._slots.slot_of.get(key)
            if slot is None:
                continue
            if self._slots.is_ready(slot):
                ready[0].append(key)
                ready[1].append(slot)
            else:
                self.parked[key] = self._whole_requests
        if not ready[0]:
            return {}
        return {n: ready for n in range(self._tier_count) if self._whole_requests >> n & 1}

    def of_wanted(self, tier: int, keys: Iterable[Key]) -> dict[int, Batch]:
        """Return the batch for a tier that wants ``keys`` now: those that are READY."""
        ready: Batch = ([], [])
        for key in keys:
            if self._is_ready(key):
                ready[0].append(key)
                ready[1].append(self._slots.slot_of[key])
        return {tier: ready} if ready[0] and self.takers >> tier & 1 else {}

    def forget(self, key: Key) -> None:
        """Note that the key's fill did not complete."""
        self.parked.pop(key, None)

    def deferred_blocks(self) -> dict[int, int]:
        """Return how many deferred blocks each tier has."""
        return {tier: len(holes) for tier, holes in self.holes.items()}

    def leave_to_requests(self, tier: int) -> None:
        """Stop offering every request's blocks to the tier: it is request-scoped."""
        self._whole_requests &= ~(1 << tier)
        self.holes.pop(tier, None)  # a request's blocks are useful to that request only

    def cut_off(self, tier: int) -> None:
        """Stop sending to the tier."""
        self.all_tiers &= ~(1 << tier)
        self.takers &= ~(1 << tier)
        self._whole_requests &= self.takers
        self.holes.pop(tier, None)

    def reset(self) -> None:
        """Forget the parked, kept and deferred blocks."""
        self.parked.clear()
        self._kept.clear()
        for holes in self.holes.values():
            holes.clear()


class DeferredBlock(NamedTuple):
    """A block that waits until its tier has room."""

    request: RequestId
    before: Key | None  #: the block that it follows, if known
    is_admitted: bool  #: whether the tier's admission policy has admitted it


class MissingPrefixes:
    """The holes of one tier."""

    def __init__(self, keys_max: int, is_there: Callable[[Key], bool]) -> None:
        """``keys_max``: limit on lost blocks kept; the oldest are forgotten.

        ``is_there``: whether the tier is known to have a block.
        """
        self._keys_max = keys_max
        self._is_there = is_there
        self._deferred: dict[Key, DeferredBlock] = {}  # in the order in which they are offered
        self._deferred_of: Counter[RequestId] = Counter()  # how many each request has brought
        self._lost: dict[Key, None] = {}

    def __bool__(self) -> bool:
        """Return whether there may be any holes."""
        return bool(self._deferred or self._lost)

    def includes(self, key: Key | None) -> bool:
        """Return whether a block is a hole, so that no block that follows it may be sent."""
        is_one = key in self._deferred or key in self._lost
        return is_one and key is not None and not self._is_there(key)

    def defer(self, key: Key, block: DeferredBlock) -> bool:
        """Keep a block until the tier has room. False: it follows a lost one, so it is lost too.

        A block that waits already keeps its place.
        """
        if self._is_lost(block.before):
            self.lose((key,))
            return False
        self._lost.pop(key, None)
        if key not in self._deferred:
            self._deferred[key] = block
            self._deferred_of[block.request] += 1
        return True

    def deferred_of(self, request: RequestId) -> int:
        """Return how many of the blocks that a request has brought are waiting."""
        return self._deferred_of.get(request, 0)

    def leave(self, keys: Iterable[Key]) -> int:
        """Note that blocks have left host memory. Return how many were deferred: they are lost."""
        gone = [key for key in keys if key in self._deferred]
        self.lose(gone)
        return len(gone)

    def lose(self, keys: Iterable[Key]) -> None:
        """Note that the tier will not get these blocks, as far as is known."""
        for key in keys:
            self._end_wait(key)
            self._lost[key] = None
        forget_oldest(self._lost, self._keys_max)

    def fill(self, key: Key, before: Key | None) -> None:
        """Note that a block, which follows ``before``, is sent to the tier."""
        assert not self.includes(before), "a block is sent behind a hole"
        self._end_wait(key)
        self._lost.pop(key, None)

    def pop(self, blocks_max: int) -> tuple[dict[Key, DeferredBlock], int]:
        """Return up to ``blocks_max`` blocks to send now, and how many follow a lost one."""
        now: dict[Key, DeferredBlock] = {}
        lost: list[Key] = []
        for key, block in self._deferred.items():
            if len(now) == blocks_max:
                break
            if self._is_lost(block.before):
                self._lost[key] = None
                lost.append(key)
            elif block.before in now or not self.includes(block.before):
                now[key] = block  # else the block before goes first
        for key, block in now.items():
            self.fill(key, block.before)
        self.lose(lost)
        return now, len(lost)

    def clear(self) -> None:
        """Forget all holes: no earlier block is sent to the tier any more."""
        self._deferred.clear()
        self._deferred_of.clear()
        self._lost.clear()

    def audit(self) -> frozenset[Key]:
        """Return all holes. For tests and diagnosis."""
        return frozenset(key for key in (*self._deferred, *self._lost) if self.includes(key))

    def __len__(self) -> int:
        """Return the number of deferred blocks."""
        return len(self._deferred)

    def waiting(self) -> dict[Key, DeferredBlock]:
        """Return the deferred blocks. For tests and diagnosis."""
        return self._deferred.copy()

    def _is_lost(self, key: Key | None) -> bool:
        return key in self._lost and self.includes(key)

    def _end_wait(self, key: Key) -> None:
        block = self._deferred.pop(key, None)
        if block is not None:
            self._deferred_of[block.request] -= 1
            if not self._deferred_of[block.request]:
                del self._deferred_of[block.request]
