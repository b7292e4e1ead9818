"""A staged tier under every order of what its tier, its copier, time and the program do.

The tier and the copier are played here: they answer late, in any order, or with failures,
as the real ones may. The program gives a slot to a new job as soon as the one before has
finished, as vLLM does. What a slot's bytes are is played too: the key that they are of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_model import PROFILE, check, check_fresh_seeds

from kvtier.core import wire
from kvtier.core.generations import Generations
from kvtier.engine.cell import EngineCell
from kvtier.engine.facade import SchedulerFacade
from kvtier.engine.staged.staged_facade import StagedFacade
from kvtier.plugin_api.backend import BackendTraits, Outcome
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.runtime import build_engine
from kvtier.settings.secondary_tier import read_secondary_tier
from tests.support.patient_limits import _patient_limits  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from kvtier.core.tier_host import TierHost
    from kvtier.core.wire import Message

EXAMPLES_CI = 300
SLOTS = 12  #: of the program
STAGING = 5
KEYS = [bytes([number]) * 8 for number in range(10)]
TIMEOUT_S = 10.0
OUTCOMES = st.sampled_from([Outcome.DONE, Outcome.DONE, Outcome.ABSENT, Outcome.FAILED])
PICK = st.integers(0, 1 << 20)


class PlayedTier:
    """Keeps what it is sent, to be answered when the test says so."""

    name = "1:memory"

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def post(self, message: Message) -> bool:
        if isinstance(message, wire.LoadJob | wire.StoreJob | wire.Probe):
            self.kept.append(message)
        return True

    def wake(self) -> None:
        """Nothing waits here."""

    poll = wake


class Copy(NamedTuple):
    number: int
    slots: Sequence[int]
    staging: Sequence[int]
    to_staging: bool


class PlayedCopier:
    """Ends a copy when the test says so."""

    def __init__(self) -> None:
        self.kept: list[Copy] = []
        self.ended: list[tuple[int, bool]] = []
        self.copied: Any = None

    def start(
        self, copy: int, slots: Sequence[int], staging: Sequence[int], *, to_staging: bool
    ) -> None:
        self.kept.append(Copy(copy, slots, staging, to_staging))

    def pop_ended(self) -> list[tuple[int, bool]]:
        ended, self.ended = self.ended, []
        return ended

    def backlog_bytes(self) -> int:
        return 0

    def wait_idle(self) -> None:
        while self.kept:
            self.end(0, success=True)

    def end(self, which: int, *, success: bool) -> None:
        copy = self.kept.pop(which)
        if success:
            self.copied(copy)
        self.ended.append((copy.number, success))

    def stop(self) -> None:
        self.wait_idle()


class StagedTierSpec(RuleBasedStateMachine):
    """One tier, and a program that never waits to use a slot again."""

    def __init__(self) -> None:
        super().__init__()
        tier = {
            "type": "memory",
            "capacity_bytes": 1 << 20,
            "promote_timeout_s": TIMEOUT_S,
            "store_timeout_s": TIMEOUT_S,
        }
        config = replace(
            read_secondary_tier({"tier": tier}, slot_count=STAGING, block_bytes=4096),
            wait_timeout_s=TIMEOUT_S,
            close_timeout_s=0.0,
            job_blocks_max=2,
        )
        self.cell = EngineCell()
        self.inbox = self.cell.inbox()
        self.tier = PlayedTier()
        engine = build_engine(
            self.cell,
            config,
            LRUPolicy(STAGING),
            {},
            [(self.inbox, self.tier)],
            collect_events=False,
        )
        (self.link,), self.primary = engine.links, engine.primary
        self.link.set_traits(BackendTraits(4, 4, None))
        self.now = 0.0
        runtime = SchedulerFacade(
            self.cell,
            engine.primary,
            engine.links,
            [cast("TierHost", self.tier)],
            close_timeout_s=0.0,
            generations=Generations("", keep=False),
            clock=lambda: self.now,
        )
        self.copier = PlayedCopier()
        self.copier.copied = self.copied
        self.staged = StagedFacade(
            runtime, config, self.copier, waiting_stores_max=6, clock=lambda: self.now
        )
        self.jobs = 0
        self.running: dict[int, dict[int, bytes]] = {}  # the program's slots of each job
        self.submitted: dict[int, float] = {}
        self.bytes: dict[int, bytes] = {}  # of the program's slots
        self.staging: dict[int, bytes] = {}
        self.inbox.post(wire.PresenceChanged(tuple(KEYS[:5]), ()))
        self.request = "r"
        self.staged.on_request_started(self.request)

    def take(self) -> None:
        for each in self.staged.drain_finished():
            slots = self.running.pop(each.job)  # raises if it had finished before
            assert sorted([*each.failed, *each.succeeded]) == sorted(slots.values())
            for slot, key in slots.items():
                if each.is_load and key in each.succeeded:
                    assert self.bytes[slot] == key, "another block was delivered"
        self.a_slot_of_the_program_is_touched_by_a_copy_of_a_running_job_only()

    # --- the program ---

    @rule(is_load=st.booleans(), first=st.integers(0, 9), count=st.integers(1, 9))
    def submit(self, is_load: bool, first: int, count: int) -> None:
        used = {slot for slots in self.running.values() for slot in slots}
        free = [slot for slot in range(SLOTS) if slot not in used][:count]
        keys = [KEYS[(first + n) % len(KEYS)] for n in range(len(free))]
        if free:
            self.jobs += 1
            self.running[self.jobs] = dict(zip(free, keys, strict=True))
            self.submitted[self.jobs] = self.now
            if not is_load:
                self.bytes.update(self.running[self.jobs])
            kind = self.staged.submit_load if is_load else self.staged.submit_store
            kind(self.jobs, self.request, keys, free)

    @rule(seconds=st.sampled_from([0.0, 0.0, 1.0, TIMEOUT_S]))
    def step(self, seconds: float) -> None:
        self.now += seconds
        self.take()
        for job in self.running:
            if self.now >= self.submitted[job] + TIMEOUT_S:
                self.what_is_late_has_finished_but_for_its_copies(job)
        self.staged.step_end()

    @rule(key=st.sampled_from(KEYS))
    def look_up(self, key: bytes) -> None:
        self.staged.lookup(key, self.request)

    @rule()
    def request_ends(self) -> None:
        self.staged.on_request_finished(self.request)
        self.request += "r"
        self.staged.on_request_started(self.request)

    @rule(resets=st.booleans())
    def drain(self, resets: bool) -> None:
        self.staged.drain()
        self.take()
        assert not self.running, "jobs outlive a drain"
        if resets:
            self.staged.reset()

    # --- the copier ---

    @precondition(lambda self: self.copier.kept)
    @rule(which=PICK, success=st.booleans())
    def copy_ends(self, which: int, success: bool) -> None:
        self.copier.end(which % len(self.copier.kept), success=success)

    def copied(self, copy: Copy) -> None:
        """Move the bytes of a copy."""
        self.a_slot_of_the_program_is_touched_by_a_copy_of_a_running_job_only()
        for slot, staged in zip(copy.slots, copy.staging, strict=True):
            if copy.to_staging:
                self.staging[staged] = self.bytes[slot]
            else:
                self.bytes[slot] = self.staging[staged]

    # --- the tier ---

    def of_tier(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.tier.kept if isinstance(each, kind)]

    @precondition(lambda self: self.of_tier(wire.LoadJob))
    @rule(which=PICK, outcomes=st.lists(OUTCOMES, min_size=STAGING, max_size=STAGING))
    def load_ends(self, which: int, outcomes: list[Outcome]) -> None:
        job = self.pick(wire.LoadJob, which)
        ends = tuple(outcomes[: len(job.keys)])
        for key, slot, outcome in zip(job.keys, job.slots, ends, strict=True):
            self.staging[slot] = key if outcome is Outcome.DONE else b"torn"
        self.inbox.post(wire.JobEnded(job.job, ends, 0.1))

    @precondition(lambda self: self.of_tier(wire.StoreJob))
    @rule(which=PICK, outcomes=st.lists(OUTCOMES, min_size=STAGING, max_size=STAGING))
    def store_ends(self, which: int, outcomes: list[Outcome]) -> None:
        job = self.pick(wire.StoreJob, which)
        assert [self.staging[slot] for slot in job.slots] == [*job.keys], "other bytes are stored"
        self.inbox.post(wire.JobEnded(job.job, tuple(outcomes[: len(job.keys)]), 0.1))

    @precondition(lambda self: self.of_tier(wire.Probe))
    @rule(which=PICK, has=st.booleans())
    def probe_ends(self, which: int, has: bool) -> None:
        probe = self.pick(wire.Probe, which)
        self.inbox.post(wire.ProbeAnswer(probe.probe, (has,) * len(probe.keys)))

    @rule(key=st.sampled_from(KEYS), comes=st.booleans())
    def contents_change(self, key: bytes, comes: bool) -> None:
        keys, since = (key,), self.link.contents.since
        gained, lost = (keys, ()) if comes else ((), keys)
        self.inbox.post(wire.PresenceChanged(gained, lost, since))

    def pick(self, kind: type[Any], which: int) -> Any:
        choices = self.of_tier(kind)
        chosen = choices[which % len(choices)]
        self.tier.kept.remove(chosen)
        return chosen

    # --- what must hold ---

    def what_is_late_has_finished_but_for_its_copies(self, job: int) -> None:
        copied = {slot for copy in self.copier.kept for slot in copy.slots}
        assert copied.intersection(self.running[job]), f"job {job} is late, and waits for the tier"

    @invariant()
    def a_slot_of_the_program_is_touched_by_a_copy_of_a_running_job_only(self) -> None:
        running = {slot for slots in self.running.values() for slot in slots}
        touched = [slot for copy in self.copier.kept for slot in copy.slots]
        assert running.issuperset(touched), "a copy touches a slot that has been given away"
        assert len(touched) == len(set(touched)), "two copies touch one slot"

    @invariant()
    def a_staging_slot_that_is_written_has_no_other_user(self) -> None:
        written = [slot for copy in self.copier.kept if copy.to_staging for slot in copy.staging]
        written += [slot for job in self.of_tier(wire.LoadJob) for slot in job.slots]
        read = [slot for copy in self.copier.kept if not copy.to_staging for slot in copy.staging]
        read += [slot for job in self.of_tier(wire.StoreJob) for slot in job.slots]
        assert len(written) == len(set(written)), "two write one staging slot"
        assert not set(written).intersection(read), "a staging slot is read while it is written"

    @invariant()
    def nothing_raises(self) -> None:
        assert self.cell.faults == 0

    def teardown(self) -> None:
        """Whatever is under way ends without a deadline, and everything is free again."""
        for _ in range(4 * SLOTS):  # if one block comes after the other
            self.all_is_done()
        assert not self.running, "jobs wait for one another"
        self.drain(resets=False)
        self.all_is_done()
        assert not self.copier.kept, "what came late is copied"
        slots = self.staged.statistics().primary
        assert slots.free_slots + slots.ready_slots == STAGING, "a staging slot is lost"
        assert not slots.pinned_slots
        assert not slots.promotion_slots, "a load that has ended keeps a slot"

    def all_is_done(self) -> None:
        """Have the tier and the copier do all that they have been given."""
        for job in self.of_tier(wire.LoadJob):
            self.staging.update(zip(job.slots, job.keys, strict=True))
        for job in self.of_tier(wire.LoadJob | wire.StoreJob):
            self.inbox.post(wire.JobEnded(job.job, (Outcome.DONE,) * len(job.keys), 0.1))
        for probe in self.of_tier(wire.Probe):
            self.inbox.post(wire.ProbeAnswer(probe.probe, (True,) * len(probe.keys)))
        self.tier.kept.clear()
        self.copier.wait_idle()
        self.take()
        self.staged.step_end()


def test_a_staged_tier_keeps_its_promises_under_every_order_of_events(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if PROFILE == "long":
        check_fresh_seeds(StagedTierSpec, None, capsys)
    else:
        check(StagedTierSpec, None, 20_261_121, EXAMPLES_CI)
