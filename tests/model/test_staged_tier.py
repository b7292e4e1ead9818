"""A staged tier under every order of what its link, its copier, time and the program do.

The link and the copier are played here: they answer late, in any order, or with failures,
as the real ones may. The program gives a slot to a new job as soon as the one before has
finished, as vLLM does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from test_model import PROFILE, check, check_fresh_seeds

from kvtier.core import messages as m
from kvtier.core import staging_messages as s
from kvtier.core import wire
from kvtier.core.actor import Actor
from kvtier.engine.cell import EngineCell
from kvtier.engine.staged.staged_tier import StagedTier
from kvtier.plugin_api.backend import Outcome
from kvtier.settings.secondary_tier import read_secondary_tier

if TYPE_CHECKING:
    import pytest

    from kvtier.core.wire import Message

EXAMPLES_CI = 100
SLOTS = 12  #: of the program
STAGING = 5
KEYS = [bytes([number]) * 8 for number in range(10)]
TIMEOUT_S = 10.0
OUTCOMES = st.sampled_from([Outcome.DONE, Outcome.DONE, Outcome.ABSENT, Outcome.FAILED])
PICK = st.integers(0, 1 << 20)


class Played(Actor):
    """Keeps what it is sent, to be answered when the test says so."""

    def __init__(self, name: str, kinds: list[type[Any]]) -> None:
        self.kept: list[Any] = []
        super().__init__(name, dict.fromkeys(kinds, self.kept.append))


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
        )
        self.cell = EngineCell()
        self.replies: list[Any] = []
        boxes = [self.cell.mailbox() for _ in range(3)]
        self.link = Played("link", [m.Promote, m.Cascade])
        for other in (
            wire.Tick,
            m.ProbeKeys,
            wire.RequestEnded,
            wire.TouchKeys,
            wire.GenerationBegan,
        ):
            self.link.handlers[other] = lambda _: None
        self.copier = Played("copier", [s.CopyBlocks])
        self.staged = StagedTier(
            config, waiting_stores_max=6, link=boxes[1], copier=boxes[2], reply=self.replies.append
        )
        for actor, box in zip((self.staged, self.link, self.copier), boxes, strict=True):
            self.cell.add(actor, box)
        self.now = 0.0
        self.epoch = 0
        self.jobs = 0
        self.running: dict[int, tuple[int, ...]] = {}  # the program's slots of each job
        self.submitted: dict[int, float] = {}
        self.abandoned: list[tuple[int, ...]] = []
        self.tell(m.RequestStarted("r", 1))

    def tell(self, message: Message) -> None:
        self.cell.ask(self.staged, message)
        self.cell.ask(self.staged, s.DrainFinished())
        for each in self.replies.pop():
            slots = self.running.pop(each.job)  # raises if it had finished before
            assert len(each.failed) + len(each.succeeded) == len(slots)
            self.a_slot_of_the_program_is_touched_by_a_copy_of_a_running_job_only()

    # --- the program ---

    @rule(is_load=st.booleans(), first=st.integers(0, 9), count=st.integers(1, 7))
    def submit(self, is_load: bool, first: int, count: int) -> None:
        used = {slot for slots in self.running.values() for slot in slots}
        free = [slot for slot in range(SLOTS) if slot not in used][:count]
        keys = tuple(KEYS[(first + n) % len(KEYS)] for n in range(len(free)))
        if free:
            self.jobs += 1
            self.running[self.jobs] = tuple(free)
            self.submitted[self.jobs] = self.now
            kind = s.SubmitLoad if is_load else s.SubmitStore
            self.tell(kind(self.jobs, "r", keys, tuple(free)))

    @rule(seconds=st.sampled_from([0.0, 1.0, TIMEOUT_S]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tell(wire.Tick(self.now))
        for job in self.running:
            if self.now >= self.submitted[job] + TIMEOUT_S:
                self.what_is_late_has_finished_but_for_its_copies(job)

    @rule()
    def look_up(self) -> None:
        self.tell(m.Lookup(KEYS[0], "r"))
        self.replies.clear()

    @rule(resets=st.booleans())
    def drain(self, resets: bool) -> None:
        self.tell(s.GiveUp())
        while self.copier.kept:
            self.copy_ends(0, success=True)
        assert not self.running, "jobs outlive a drain"
        if resets:
            self.epoch += 1
            self.tell(m.Reset(bytes([self.epoch])))

    # --- the copier ---

    @precondition(lambda self: self.copier.kept)
    @rule(which=PICK, success=st.booleans())
    def copy_ends(self, which: int, success: bool) -> None:
        self.a_slot_of_the_program_is_touched_by_a_copy_of_a_running_job_only()
        copy = self.copier.kept.pop(which % len(self.copier.kept))
        self.tell(s.BlocksCopied(copy.copy, success))

    # --- the link ---

    def of_link(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.link.kept if isinstance(each, kind)]

    @precondition(lambda self: self.of_link(m.Promote))
    @rule(which=PICK, outcomes=st.lists(OUTCOMES, min_size=STAGING, max_size=STAGING))
    def promotion_ends(self, which: int, outcomes: list[Outcome]) -> None:
        promote = self.take(m.Promote, which)
        ends = tuple(outcomes[: len(promote.keys)])
        self.tell(m.PromotionEnded(0, promote.keys, promote.slots, ends, promote.epoch))

    @precondition(lambda self: self.of_link(m.Promote))
    @rule(which=PICK)
    def promotion_is_abandoned(self, which: int) -> None:
        promote = self.take(m.Promote, which)
        self.abandoned.append(promote.slots)
        self.tell(m.PromotionAbandoned(0, promote.keys, promote.slots, promote.epoch))

    @precondition(lambda self: self.abandoned)
    @rule(which=PICK)
    def slots_are_released(self, which: int) -> None:
        self.tell(m.SlotsReleased(self.abandoned.pop(which % len(self.abandoned))))

    @precondition(lambda self: self.of_link(m.Cascade))
    @rule(which=PICK, stored=st.booleans())
    def cascade_ends(self, which: int, stored: bool) -> None:
        cascade = self.take(m.Cascade, which)
        if stored and cascade.epoch == self.epoch:
            self.tell(m.PresenceLearned(0, cascade.keys, (), self.epoch))
        self.tell(m.CascadeEnded(0, cascade.keys, cascade.slots, cascade.epoch))

    @rule(key=st.sampled_from(KEYS))
    def block_is_lost(self, key: bytes) -> None:
        self.tell(m.PresenceLearned(0, (), (key,), self.epoch))

    @rule(usable=st.booleans())
    def breaker_moves(self, usable: bool) -> None:
        self.tell(m.TierUsable(0, usable))

    def take(self, kind: type[Any], which: int) -> Any:
        choices = self.of_link(kind)
        chosen = choices[which % len(choices)]
        self.link.kept.remove(chosen)
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
    def a_staging_slot_is_free_or_held_by_one_block(self) -> None:
        held = [slot for copy in self.copier.kept for slot in copy.staging]
        held += [slot for each in self.link.kept for slot in each.slots]
        held += [slot for slots in self.abandoned for slot in slots]
        assert len(held) == len(set(held)), "two blocks have one staging slot"
        assert self.staged.free_slots() == STAGING - len(held), "a staging slot is lost"

    @invariant()
    def nothing_raises(self) -> None:
        assert self.cell.faults == 0

    def teardown(self) -> None:
        """Whatever was under way ends, and everything is free again."""
        self.drain(resets=False)
        for promote in self.of_link(m.Promote):
            ends = (Outcome.DONE,) * len(promote.keys)
            self.tell(m.PromotionEnded(0, promote.keys, promote.slots, ends, promote.epoch))
        for cascade in self.of_link(m.Cascade):
            self.tell(m.CascadeEnded(0, cascade.keys, cascade.slots, cascade.epoch))
        for slots in self.abandoned:
            self.tell(m.SlotsReleased(slots))
        assert not self.copier.kept, "what came late is copied"
        assert self.staged.free_slots() == STAGING


def test_a_staged_tier_keeps_its_promises_under_every_order_of_events(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if PROFILE == "long":
        check_fresh_seeds(StagedTierSpec, None, capsys)
    else:
        check(StagedTierSpec, None, 20_261_121, EXAMPLES_CI)
