"""The world of the model: the real runtime in a test cell, a GPU and tiers that are not real.

The model is plain dicts, asked first where possible: what was committed for a
key, what each READY key's bytes must be, what the GPU and the tiers are doing
with which slot. ``observe`` sees every single delivery, so that what must hold
between two deliveries of one facade call is checked there.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disk_tier import BLOCK_BYTES as DISK_BLOCK_BYTES
from disk_tier import DiskTier, plan_of
from fakes import FakeDevice, Gpu
from movement import Movements
from moves import KEY_MOVES, CheckedStates, state_in

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.core.events import PRIMARY, EventKind
from kvtier.core.generations import mark_of_name, marked
from kvtier.engine.primary.slot_table import GPU
from kvtier.plugin_api.backend import BackendTraits
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings.runtime_config import RuntimeConfig, TierConfig
from kvtier.tier import driver_messages as d
from tests.support import handled_once
from tests.support.cell import TestMailbox, TestTier, open_test_runtime

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.core.actor import Actor
    from kvtier.core.wire import Message
    from kvtier.engine.link.tier_link import TierLink
    from kvtier.engine.primary.lookups import LookedUp
    from kvtier.plugin_api.eviction_policy import EvictionPolicy
    from kvtier.plugin_api.keys import Key

BLOCK_BYTES = 24
PIECES = 3  # a copy is made in as many pieces, with anything in between


def block(name: str, group: int = 0) -> Key:
    """Name a block as vLLM does: hash, then the KV-cache group's index."""
    return name.encode().ljust(4, b"-") + group.to_bytes(4, "big")


SHARED = tuple(block(f"s{i}") for i in range(3))
PATHS: tuple[tuple[Key, ...], ...] = (
    SHARED + tuple(block(f"a{i}") for i in range(4)),
    SHARED + tuple(block(f"b{i}") for i in range(3)),
    # Two KV-cache groups: each has a prefix of its own.
    tuple(block(f"s{i}", group) for i in range(3) for group in range(2)),
)
KEYS = tuple(dict.fromkeys(key for path in PATHS for key in path))


def pattern(key: Key, version: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    """Return bytes that no other key and no other store of the key has, in any piece."""
    number = KEYS.index(key)
    times = block_bytes // BLOCK_BYTES
    return b"".join(struct.pack(">HIH", number, version, piece) * times for piece in range(PIECES))


@dataclass(frozen=True)
class DiskShape:
    """A tier's simulated disk."""

    regions: int = 6
    slots: int = 2  #: in each region
    own_page_slots: int = 2  #: so many blocks written together have table pages of their own
    ttl_s: int = 0


@dataclass(frozen=True)
class TierShape:
    """One tier of a run."""

    capacity: int | None = None  #: None: others may change what it holds
    request_level: bool = False
    batches_max: int = 2
    admission: str = "all"
    disk: DiskShape | None = None  #: its backend is the real one, on a simulated disk


@dataclass(frozen=True)
class Shape:
    """What one run of the model is configured with."""

    slot_count: int = 6
    tiers: tuple[TierShape, ...] = (TierShape(capacity=4), TierShape())
    job_blocks_max: int = 2
    store_threshold: int = 0
    cascade_slots_fraction_max: float = 1.0
    abandoned_slots_fraction_max: float = 0.5
    jobs_in_flight_max: int = 8
    breaker_failures_max: int = 3
    store_reserve_fraction: float = 1 / 16
    on_reset: str = "keep"
    weights_version: str = ""
    prefill_tokens_per_s: float | None = None

    @property
    def block_bytes(self) -> int:
        """A disk's blocks are longer than its pages; others are as short as possible."""
        return DISK_BLOCK_BYTES if any(tier.disk for tier in self.tiers) else BLOCK_BYTES


def disk_tier(disk: DiskShape, **options: int) -> TierShape:
    """Return the shape of a tier on a disk, with the capacity that such a disk has."""
    return TierShape(capacity=plan_of(disk).capacity_blocks, disk=disk, **options)


@dataclass
class Request:
    """One running request, as the scheduler sees it."""

    name: str
    path: tuple[Key, ...]
    tiers: int
    behind: dict[bytes, Key] = field(default_factory=dict)  # group → key PROBING in this step
    hits: dict[Key, None] = field(default_factory=dict)  # said True in this step
    is_told: bool = False  # it has told the order of its keys


def _slow_to_tell(links: Sequence[TierLink]) -> Sequence[TierLink]:
    """Have links pass on one loss a step: what tiers have to tell waits, and often."""
    for link in links:
        link.contents.gone_a_step = 1
    return links


class World:
    """One run: what is real, what is fake, and what the model knows."""

    def __init__(self, shape: Shape, make_policy: type[EvictionPolicy]) -> None:
        self.shape = shape
        self.make_policy = make_policy
        self.now = 1000.0
        self.versions = 0
        self.mark = mark_of_name(shape.weights_version)  # of the generation of weights
        self.config = RuntimeConfig(
            slot_count=shape.slot_count,
            block_bytes=shape.block_bytes,
            store_threshold=shape.store_threshold,
            tiers=tuple(
                TierConfig(
                    name=f"{number}:fake",
                    type="fake",
                    enable_kv_events=True,
                    offload_policy="request_level" if tier.request_level else "chunk_level",
                    admission=tier.admission,
                    probe_timeout_s=1.0,
                    promote_timeout_s=1.5,
                    store_timeout_s=4.0,
                )
                for number, tier in enumerate(shape.tiers, start=1)
            ),
            lease_timeout_s=6.0,
            wait_timeout_s=2.0,
            store_reserve_fraction=shape.store_reserve_fraction,
            on_reset=shape.on_reset,
            weights_version=shape.weights_version,
            cascade_slots_fraction_max=shape.cascade_slots_fraction_max,
            abandoned_slots_fraction_max=shape.abandoned_slots_fraction_max,
            job_blocks_max=shape.job_blocks_max,
            jobs_in_flight_max=shape.jobs_in_flight_max,
            breaker_failures_max=shape.breaker_failures_max,
            breaker_pause_s=1.0,
            breaker_pause_s_max=4.0,
            load_policy="auto",
            prefill_tokens_per_s=shape.prefill_tokens_per_s,
        )
        self.memory = SlotMemory.anonymous(shape.slot_count, shape.block_bytes)
        self.runtime = open_test_runtime(
            self.config,
            make_policy(shape.slot_count),
            [
                (
                    self.traits(tier),
                    None if tier.capacity is None else make_policy(tier.capacity),
                )
                for tier in shape.tiers
            ],
            clock=lambda: self.now,
            random_bytes=self._never_twice,
        )
        self.facade = self.runtime.facade
        self.cell = self.runtime.cell
        self.primary = self.runtime.primary
        self.slots = self.primary.slots
        self.slots.state = self.primary._lookups._slot_state = CheckedStates(self.slots.state)
        handled_once.watch(self.primary)
        self.links = _slow_to_tell(self.runtime.engine.links)
        self.gates = {gate.tier: gate for gate in self.runtime.engine.gates}
        self.policy = self.runtime.engine.policy.policy

        self.rules_run, self.last_run = 0, dict[str, int]()  # and of each rule, rules_run then

        # The scheduler and its GPU.
        self.requests: dict[str, Request] = {}
        self.requests_started = 0
        self.gpu = Gpu(self)

        # Bytes.
        self.committed: dict[Key, set[bytes]] = defaultdict(set)  # by ``name``
        self.bytes_of: dict[Key, bytes] = {}  # READY keys

        # Jobs, as slots: what tiers are at liberty to do with which slot.
        self.at_tier: list[dict[int, wire.LoadJob | wire.StoreJob]] = [{} for _ in shape.tiers]
        self.promoting: Counter[tuple[int, int, int]] = Counter()  # tier, epoch, slot
        self.abandoned: Counter[int] = Counter()  # slot
        self.cascading: Counter[tuple[int, int, int]] = Counter()  # tier, epoch, slot
        self.epoch = 0
        self.strays = [0 for _ in shape.tiers]
        self.honest = [True for _ in shape.tiers]  # its messages were not garbled by the test
        self.exact = [True for _ in shape.tiers]  # its backend gave one outcome a block
        self.dead = [False for _ in shape.tiers]  # broke, and was not fenced yet
        self.fenced = [False for _ in shape.tiers]
        self.broken_links: set[int] = set()
        self.movements = Movements(self)
        self.known_answers: dict[str, dict[Key, BlockState]] = {}

        # Promises over time.
        self.leases: dict[Key, tuple[str, float]] = {}
        self.lease_until: dict[str, float] = {}
        self.decided: set[str] = set()  # requests that were scheduled, and look up no more
        self.pending_since: dict[Key, float] = {}  # PROBING or filling from a tier, and sent
        self.folded: dict[int, set[Key]] = {
            tier: set() for tier in range(PRIMARY, len(shape.tiers))
        }
        self.states = dict.fromkeys(KEYS, BlockState.ABSENT)
        self.counters: dict[str, int | float] = {}  # as they were last seen
        self.looked_up: Mapping[str, LookedUp] = {}  # as they were last seen

        self.devices = [
            FakeDevice(self, held) if tier.disk is None else DiskTier(self, held, tier.disk)
            for tier, held in zip(shape.tiers, self.runtime.tiers, strict=True)
        ]
        self.disks = [each for each in self.devices if isinstance(each, DiskTier)]
        for device in self.devices:
            device.tier.on_announce_contents = device.announce_contents

        self.cell.after_delivery = self.observe
        self.cell.before_delivery = self.foresee
        self.cell.on_post = self.note_post

    @staticmethod
    def traits(tier: TierShape) -> BackendTraits:
        """Return what a tier of this shape tells of its backend."""
        return BackendTraits(tier.batches_max, tier.batches_max, tier.capacity)

    def new_bytes(self, key: Key) -> bytes:
        """Return bytes for a key that nothing had before."""
        self.versions += 1
        return pattern(key, self.versions, self.shape.block_bytes)

    def name(self, key: Key) -> Key:
        """Return what backends call the key in the generation that the engine is in."""
        return marked((key,), self.mark)[0]

    def _never_twice(self, count: int) -> bytes:
        self.versions += 1
        return self.versions.to_bytes(count, "big")

    def pass_time(self, seconds: float) -> None:
        """Let time pass, at the disks as well."""
        self.now += seconds
        for disk in self.disks:
            disk.pass_time(seconds)

    def serve_anew(self, number: int) -> TestTier:
        """Have a fresh cell serve a tier whose old one was fenced."""
        tier = self.shape.tiers[number]
        policy = None if tier.capacity is None else self.make_policy(tier.capacity)
        held = TestTier(self.cell, self.links[number], self.traits(tier), policy)
        self.runtime.tiers[number] = held
        self.devices[number].tier = held
        held.on_announce_contents = self.devices[number].announce_contents
        self.fenced[number] = False
        self.honest[number] = True
        self.exact[number] = True
        held.inbox.post(wire.TierRestarted())
        return held

    # --- calling the facade ---

    def in_order(self, schedule: bytes) -> None:
        """Take the next deliveries in the order of ``schedule``; b"" is the engine cell's own.

        A byte may also pick a mailbox from elsewhere: then something of a
        tier's happens in the middle of the facade call.
        """
        choices = iter(schedule)
        self.cell.pick = lambda waiting: next(choices, 0) % len(waiting)

    # --- what is seen of the runtime ---

    def note_post(self, mailbox: TestMailbox, message: Message) -> None:
        """Note which jobs a tier may work on: from the post of the job to the post of its end."""
        if isinstance(message, m.ProbeKeys):
            waiters = self.primary.audit().directory.waiters
            idle = [key for key in message.keys if not waiters.get(key)]
            assert not idle, f"{idle} are asked for, and nobody waits for the answer"
        if isinstance(message, wire.LoadJob | wire.StoreJob):
            for tier, held in enumerate(self.runtime.tiers):
                if held.mailbox is mailbox:
                    self.at_tier[tier][message.job] = message
        elif isinstance(message, wire.JobEnded):
            for tier, held in enumerate(self.runtime.tiers):
                if held.inbox is mailbox:
                    self.at_tier[tier].pop(message.job, None)
        self.movements.note_post(mailbox, message)

    def foresee(self, actor: Actor, message: Message) -> None:
        """Note what is about to be delivered, where what was before matters."""
        self.movements.foresee(actor, message)
        if isinstance(message, m.StepEnd | wire.Tick) and actor is self.primary:
            self._expire_leases(message.now)
        for tier, link in enumerate(self.links):
            if actor is link:
                self._count_strays(tier, message)
                self._take_promotion(tier, message)
            if actor is self.gates.get(tier, link):
                self._take_cascade(tier, message)

    def _count_strays(self, tier: int, message: Message) -> None:
        """Count what the link must count: ends of jobs and probes that it doesn't wait for."""
        link = self.links[tier]
        if isinstance(message, wire.JobEnded):
            job = link.audit().jobs.get(message.job)
            self.strays[tier] += job is None or job.abandoned
        elif isinstance(message, wire.ProbeAnswer):
            self.strays[tier] += message.probe not in link.audit().probes

    def _take_promotion(self, tier: int, message: Message) -> None:
        """Note what the primary tier asked of a link: each must end once."""
        if isinstance(message, m.Promote):
            for slot in message.slots:
                self.promoting[tier, message.epoch, slot] += 1

    def _take_cascade(self, tier: int, message: Message) -> None:
        """Note what the primary tier asked of a link, or of the gate before it."""
        if isinstance(message, m.Cascade):
            for slot in message.slots:
                self.cascading[tier, message.epoch, slot] += 1

    def observe(self, actor: Actor, message: Message) -> None:
        """Check what must hold after every single delivery."""
        if actor is self.primary:
            self.p8_every_job_gets_exactly_one_completion(message)
            if isinstance(message, m.Reset):
                self.epoch += 1
                self.mark = self.mark if message.mark is None else message.mark
                self.leases.clear()
                self.lease_until.clear()
            self._see_moves(message)
        self.movements.observe(actor, message)
        if not isinstance(message, d.AnnounceContents):
            for disk in self.disks:
                if actor is disk.tier.driver.actor:
                    disk.take(message)

    def p8_every_job_gets_exactly_one_completion(self, message: Message) -> None:
        """Every job gets exactly one completion, and every slot of it is in it."""
        if isinstance(message, m.PromotionEnded | m.PromotionAbandoned | m.PromotionWithdrawn):
            for slot in message.slots:
                self._end_one(self.promoting, (message.tier, message.epoch, slot))
                if isinstance(message, m.PromotionAbandoned):
                    self.abandoned[slot] += 1
        elif isinstance(message, m.SlotsReleased | m.PromotionLate):
            for slot in message.slots:
                self._end_one(self.abandoned, slot)
        elif isinstance(message, m.CascadeEnded | m.CascadeDeferred):
            for slot in message.slots:
                self._end_one(self.cascading, (message.tier, message.epoch, slot))

    @staticmethod
    def _end_one(open_ones: Counter, one: object) -> None:
        assert open_ones[one] > 0, f"ended twice, or never begun: {one}"
        open_ones[one] -= 1
        if not open_ones[one]:
            del open_ones[one]

    def _see_moves(self, message: Message) -> None:
        seen = self.primary.audit()
        for key in KEYS:
            before, after = self.states[key], state_in(seen, key)
            if before is after:
                if after is BlockState.FILLING and isinstance(message, m.Reset):
                    raise AssertionError(f"{key!r} is FILLING after a reset")
                continue
            self.states[key] = after
            assert (before, after) in KEY_MOVES, f"{key!r}: {before!r} → {after!r}"
            if before is BlockState.FILLING or before is BlockState.PROBING:
                self.pending_since.pop(key, None)
            if after is BlockState.READY:
                self.p14_what_becomes_ready_was_committed(key)
            elif before is BlockState.READY:
                self._left(key, message)
            elif after is BlockState.ABSENT:
                self.leases.pop(key, None)

    def p14_what_becomes_ready_was_committed(self, key: Key) -> None:
        """READY bytes are what somebody committed for the key, whole and since the last reset."""
        slot = self.primary.slot_of(key)
        assert slot is not None
        data = bytes(self.memory.view(slot))
        assert data in self.committed[self.name(key)], f"{key!r} became READY with {data!r}"
        self.bytes_of[key] = data

    def _left(self, key: Key, message: Message) -> None:
        """What is pinned, leased, or was called a HIT in this step is not evicted."""
        del self.bytes_of[key]
        if isinstance(message, m.Reset):
            return
        assert key not in self.leases, f"{key!r} is leased to {self.leases[key]} and was evicted"
        for request in self.requests.values():
            assert key not in request.hits, f"{key!r} was a HIT in this step and was evicted"
        for load in self.gpu.loads:
            assert load.is_stale or key not in load.keys, f"{key!r} is read and was evicted"
        if isinstance(message, m.Victims):
            self.p18_while_a_request_runs_its_tail_goes_before_its_head(key)

    def p18_while_a_request_runs_its_tail_goes_before_its_head(self, key: Key) -> None:
        """While a request runs, its tail goes before its head."""
        slots = self.slots
        for request in self.requests.values():
            if not request.is_told or key not in request.path:
                continue
            for behind in request.path[request.path.index(key) + 1 :]:
                slot = self.primary.slot_of(behind)
                stays = behind in self.primary.audit().excluded or slot is None
                assert stays or slots.is_held(slot) or slot in slots.hits, (
                    f"{key!r} was evicted, and not {behind!r} behind it in {request.name}"
                )

    def _expire_leases(self, now: float) -> None:
        for request in [each for each, until in self.lease_until.items() if now >= until]:
            self.end_leases(request)

    def end_leases(self, request: str, keys: Sequence[Key] = KEYS) -> None:
        """Forget the request's leases on ``keys``."""
        for key in [key for key, (whose, _) in self.leases.items() if whose == request]:
            if key in keys:
                del self.leases[key]
        if not any(whose == request for whose, _ in self.leases.values()):
            self.lease_until.pop(request, None)

    # --- the truth about slots ---

    def state_of(self, key: Key) -> BlockState:
        """Return the key's state. It counts nothing and asks nobody."""
        return state_in(self.primary.audit(), key)

    def writers(self) -> Counter[tuple[int, int]]:
        """Return slot and source of everybody who may write: the GPU, or a tier's number."""
        found = Counter((store.slot, GPU) for store in self.gpu.stores)
        for tier, jobs in enumerate(self.at_tier):
            for job in jobs.values():
                if isinstance(job, wire.LoadJob):
                    found.update((slot, tier) for slot in job.slots)
        return found

    def readers(self) -> Counter[int]:
        """Return the slots that somebody may read, and how many do."""
        found = Counter(slot for load in self.gpu.loads for slot in load.slots)
        for jobs in self.at_tier:
            for job in jobs.values():
                if isinstance(job, wire.StoreJob):
                    found.update(job.slots)
        return found

    def drain_events(self) -> None:
        """Fold what became resident and what went."""
        for event in self.facade.take_events():
            resident = self.folded[event.tier]
            if event.kind is EventKind.STORED:
                resident.update(event.keys)
            elif event.kind is EventKind.REMOVED:
                resident.difference_update(event.keys)
            elif event.kind is EventKind.CLEARED:
                resident.clear()

    def is_busy(self, number: int) -> bool:
        """Tell whether the tier has something to do, or to say."""
        tier = self.runtime.tiers[number]
        boxes = [tier.inbox, *tier.mailboxes]
        is_at_work = bool(tier.batches) or self.devices[number].is_at_work()
        return is_at_work or any(each.waiting for each in boxes)
