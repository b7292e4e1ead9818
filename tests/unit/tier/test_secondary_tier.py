from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.plugin_api.backend import BackendTraits, Outcome
from kvtier.policies.eviction.lru import LRUPolicy
from kvtier.settings.runtime_config import RuntimeConfig, TierConfig
from kvtier.tier import driver_messages as d
from kvtier.tier.bounded_tier import BoundedTier
from tests.support.cell import TestCell, TestTier, build_test_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.core.wire import Message
    from tests.support.cell import Batch

DONE, ABSENT, DAMAGED, FAILED = Outcome.DONE, Outcome.ABSENT, Outcome.DAMAGED, Outcome.FAILED


def keys(count: int, name: str = "k") -> tuple[bytes, ...]:
    return tuple(f"{name}{number:03}".encode() for number in range(count))


class Bench:
    """One tier on its own: what its link would send, and what it answers."""

    def __init__(
        self,
        batches_max: int = 4,
        capacity: int | None = None,
        *,
        loads_min: int = 1,
        stores_min: int = 1,
        **more_traits: Any,
    ) -> None:
        config = RuntimeConfig(slot_count=8, block_bytes=8, tiers=(TierConfig("t", "1:t"),))
        self.cell = TestCell()
        (self.link,) = build_test_engine(self.cell, config, LRUPolicy(8)).links
        policy = None if capacity is None else LRUPolicy(capacity)
        traits = BackendTraits(
            batches_max,
            batches_max,
            capacity,
            load_batch_blocks_min=loads_min,
            store_batch_blocks_min=stores_min,
            **more_traits,
        )
        self.tier = TestTier(self.cell, self.link, traits, policy)
        self.jobs = 0

    def send(self, message: Message) -> None:
        self.link.tier.post(message)
        self.run()

    def load(self, *wanted: bytes) -> int:
        self.jobs += 1
        self.send(wire.LoadJob(job=self.jobs, keys=wanted, slots=tuple(range(len(wanted)))))
        return self.jobs

    def store(self, *given: bytes) -> int:
        self.jobs += 1
        self.send(
            wire.StoreJob(job=self.jobs, request="r", keys=given, slots=tuple(range(len(given))))
        )
        return self.jobs

    def run(self) -> None:
        while waiting := [each for each in self.tier.mailboxes if each.waiting]:
            self.cell.deliver(waiting[0])
            if isinstance(self.tier.actor, BoundedTier):
                seen = self.tier.actor.audit()
                assert seen.coming == seen.storing.keys() - seen.resident

    def answer(self, outcome: Outcome = DONE, batch: int = 0) -> d.LoadBatch | d.StoreBatch:
        chosen = self.tier.batches[batch]
        assert isinstance(chosen, d.LoadBatch | d.StoreBatch)
        self.tier.answer(chosen, [outcome] * len(chosen.keys), 1.0)
        self.run()
        return chosen

    def keep(self, *given: bytes) -> None:
        self.store(*given)
        while self.tier.batches:
            self.answer()

    def said(self) -> list[Message]:
        said = list(self.tier.inbox.waiting)
        self.tier.inbox.clear()
        return said


def sizes(batches: Sequence[Batch]) -> list[int]:
    return [len(batch.keys) for batch in batches]


def test_a_block_that_is_lost_while_it_is_stored_anew_needs_room_again() -> None:
    bench = Bench(capacity=2)
    bench.keep(b"a", b"b")
    bench.store(b"a")
    bench.tier.mailbox.post(d.ContentsLost(keys=(b"a",)))
    bench.store(b"c")
    while bench.tier.batches:
        bench.answer()
    assert bench.tier.bounded._resident == {b"a", b"c"}
    assert bench.tier.actor.is_idle()


def test_both_kinds_of_tier_understand_what_any_tier_is_sent() -> None:
    """What only one of them does is about victims, and about what was stored before."""
    shared, own = Bench().tier.actor.handlers, Bench(capacity=2).tier.actor.handlers
    contents = {d.ContentsFound, d.ContentsAnnounced}
    assert own.keys() - shared.keys() == {
        m.Victims,
        wire.PolicyBroke,
        wire.PolicyReturned,
        *contents,
    }
    # A request-scoped tier has no capacity.
    of_requests = {wire.RequestOpened, wire.RequestClosed, wire.PrefixHits}
    of_requests |= {wire.BlocksWanted, wire.BlocksMissing}
    assert shared.keys() - of_requests <= own.keys()


def test_loads_and_stores_are_cut_as_finely_as_the_backend_wants_each() -> None:
    bench = Bench(batches_max=4, loads_min=2, stores_min=4)
    bench.load(*keys(4, "l"))
    assert sizes(bench.tier.batches) == [2, 2]
    bench.store(*keys(4, "s"))
    assert sizes(bench.tier.batches) == [2, 2, 4]


def test_loads_and_stores_do_not_starve_each_other() -> None:
    bench = Bench(batches_max=1)
    bench.store(*keys(40, "s"))
    bench.load(*keys(2))
    assert [type(batch) for batch in bench.tier.batches] == [d.StoreBatch, d.LoadBatch]


def test_the_answers_of_all_parts_are_one_answer_in_the_order_of_the_job() -> None:
    bench = Bench(batches_max=3)
    job = bench.load(*keys(3))
    bench.answer(FAILED, batch=2)
    bench.answer(DONE, batch=0)
    assert bench.said() == []
    bench.answer(ABSENT, batch=0)
    gone, answer = bench.said()
    assert gone == wire.PresenceChanged((), keys(3)[1:2])
    assert answer == wire.JobEnded(job=job, outcomes=(DONE, ABSENT, FAILED), seconds=3.0)
    assert bench.tier.actor.is_idle()


def test_small_stores_that_waited_go_in_one_call_and_each_job_has_its_own_answer() -> None:
    bench = Bench(batches_max=1, capacity=8, stores_min=4)
    bench.store(b"a")
    second, third = bench.store(b"b", b"c"), bench.store(b"d")
    bench.answer()
    bench.said()
    (batch,) = bench.tier.batches
    assert isinstance(batch, d.StoreBatch)
    assert (batch.keys, batch.slots) == ((b"b", b"c", b"d"), (0, 1, 0))
    bench.tier.answer(batch, [DONE, FAILED, DONE], 3.0)
    bench.run()
    assert bench.said() == [
        wire.JobEnded(job=second, outcomes=(DONE, FAILED), seconds=2.0),
        wire.JobEnded(job=third, outcomes=(DONE,), seconds=1.0),
    ]
    assert bench.tier.bounded._resident == {b"a", b"b", b"d"}
    assert bench.tier.actor.is_idle()


def test_a_part_with_the_wrong_number_of_answers_failed() -> None:
    bench = Bench(batches_max=1)
    job = bench.load(*keys(2))
    bench.tier.answer(bench.tier.batches[0], [DONE])
    bench.run()
    assert bench.said() == [wire.JobEnded(job=job, outcomes=(FAILED, FAILED), seconds=0.0)]


def test_a_part_that_ends_twice_ends_once() -> None:
    bench = Bench(batches_max=1)
    bench.load(*keys(1))
    batch = bench.answer()
    bench.tier.answer(batch, [DONE])
    bench.run()
    assert len(bench.said()) == 1


def test_a_probe_of_a_shared_tier_is_asked_of_the_backend() -> None:
    bench = Bench()
    bench.send(wire.Probe(probe=7, keys=keys(2)))
    bench.tier.answer(bench.tier.batches[0], [DONE, ABSENT])
    bench.run()
    assert bench.said() == [wire.ProbeAnswer(probe=7, present=(True, False))]


# --- with a capacity ---


def test_a_probe_of_a_known_tier_is_answered_without_the_backend() -> None:
    bench = Bench(capacity=4)
    bench.keep(*keys(1))
    bench.said()
    bench.send(wire.Probe(probe=7, keys=keys(2)))
    assert bench.tier.batches == []
    assert bench.said() == [wire.ProbeAnswer(probe=7, present=(True, False))]


def test_room_is_made_by_removing_tails_first_and_no_more_than_needed() -> None:
    bench = Bench(batches_max=4, capacity=4)
    bench.keep(*keys(4))
    bench.said()
    bench.store(*keys(2, "new"))
    batches = list(bench.tier.batches)
    removed = [key for batch in batches if isinstance(batch, d.StoreBatch) for key in batch.remove]
    assert removed == [keys(4)[3], keys(4)[2]]
    assert [each.removed for each in bench.said()] == [(keys(4)[3],), (keys(4)[2],)]


def test_what_is_loaded_is_not_evicted() -> None:
    bench = Bench(batches_max=1, capacity=1)
    bench.keep(b"a")
    bench.load(b"a")
    bench.store(b"b")
    (_, store) = bench.tier.batches
    assert isinstance(store, d.StoreBatch)
    assert store.remove == ()


def test_what_is_stored_again_is_not_evicted_meanwhile() -> None:
    """Else its removal could overtake its store, and the tier would think that it has it."""
    bench = Bench(batches_max=2, capacity=1)
    bench.keep(b"a")
    bench.store(b"a")
    bench.store(b"b")
    assert [batch.remove for batch in bench.tier.batches if isinstance(batch, d.StoreBatch)] == [
        (),
        (),
    ]


def test_a_store_waits_while_an_older_copy_is_being_removed() -> None:
    bench = Bench(batches_max=2, capacity=1)
    bench.keep(b"a")
    bench.store(b"b")
    bench.store(b"a")
    (first,) = bench.tier.batches
    assert isinstance(first, d.StoreBatch)
    assert first.remove == (b"a",)
    bench.answer()
    (second,) = bench.tier.batches
    assert second.keys == (b"a",)


def test_a_damaged_block_is_forgotten_and_said_so() -> None:
    bench = Bench(batches_max=1, capacity=2)
    bench.keep(b"a")
    bench.said()
    bench.load(b"a")
    bench.answer(DAMAGED)
    assert wire.PresenceChanged(added=(), removed=(b"a",)) in bench.said()
    bench.send(wire.Probe(probe=1, keys=(b"a",)))
    assert bench.said() == [wire.ProbeAnswer(probe=1, present=(False,))]


def test_a_failed_load_says_nothing_of_the_copy() -> None:
    bench = Bench(batches_max=1, capacity=2)
    bench.keep(b"a")
    bench.load(b"a")
    bench.answer(FAILED)
    bench.said()
    bench.send(wire.Probe(probe=1, keys=(b"a",)))
    assert bench.said() == [wire.ProbeAnswer(probe=1, present=(True,))]


def test_a_failed_store_takes_no_room() -> None:
    bench = Bench(batches_max=1, capacity=1)
    bench.store(b"a")
    bench.answer(FAILED)
    bench.store(b"b")
    removed = [batch.remove for batch in bench.tier.batches if isinstance(batch, d.StoreBatch)]
    assert removed == [(b"a",)], "no victim; but the backend may have what failed"


def test_what_a_load_found_damaged_before_its_store_was_reported_is_announced_as_gone() -> None:
    bench = Bench(batches_max=2, capacity=4)
    bench.keep(b"a")
    bench.said()
    bench.store(b"a", b"b")
    bench.load(b"a")
    store_a, store_b, load = bench.tier.batches
    for batch, outcome in ((store_a, DONE), (load, DAMAGED), (store_b, DONE)):
        bench.tier.answer(batch, [outcome])
        bench.run()
    kinds = [type(each) for each in bench.said()]
    assert kinds[-2:] == [wire.JobEnded, wire.PresenceChanged]


def test_what_a_backend_has_from_before_is_announced_and_evicted_like_the_rest() -> None:
    """Oldest batch first; within a batch tails go before heads."""
    bench = Bench(capacity=4)
    for batch in (keys(2, "old"), keys(2, "new")):
        bench.tier.mailbox.post(d.ContentsFound(keys=batch))
    bench.run()
    assert bench.said() == [
        wire.PresenceChanged(added=keys(2, "old"), removed=()),
        wire.PresenceChanged(added=keys(2, "new"), removed=()),
    ]
    bench.store(b"more")
    batch = bench.tier.batches[0]
    assert isinstance(batch, d.StoreBatch)
    assert batch.remove == keys(2, "old")[1:]


def test_what_the_backend_has_not_reported_yet_is_asked_of_it() -> None:
    """Right after a restart; a million blocks are reported within seconds, not at once."""
    bench = Bench(capacity=4)
    reports: list[d.AnnounceContents] = []
    bench.tier.on_announce_contents = reports.append
    wanted = keys(2)
    bench.send(wire.Probe(probe=1, keys=wanted))
    (batch,) = bench.tier.batches
    assert isinstance(batch, d.ProbeBatch)
    bench.tier.mailbox.post(d.ContentsFound(keys=wanted[:1]))  # as the driver does
    bench.tier.answer(batch, [DONE, Outcome.ABSENT])
    bench.run()
    assert bench.said() == [
        wire.PresenceChanged(added=wanted[:1], removed=()),
        wire.ProbeAnswer(probe=1, present=(True, False)),
    ]
    bench.send(wire.Probe(probe=2, keys=wanted[:1]))
    assert bench.tier.batches == [], "it is known by now"
    bench.tier.mailbox.post(d.ContentsAnnounced())
    bench.said()
    bench.send(wire.Probe(probe=3, keys=wanted))
    assert bench.tier.batches == []
    assert bench.said() == [wire.ProbeAnswer(probe=3, present=(True, False))]


def test_a_generation_that_is_come_back_to_is_found_by_the_first_probe() -> None:
    """Before its blocks have been reported once more."""
    bench = Bench(capacity=4)
    bench.send(wire.GenerationBegan(epoch=1, mark=b"new"))
    bench.tier.mailbox.post(d.ContentsFound(keys=keys(2)))
    bench.run()
    bench.said()
    bench.send(wire.Probe(probe=1, keys=keys(2), since=2))
    assert bench.said()[-1] == wire.ProbeAnswer(probe=1, present=(True, True))


def test_no_more_is_taken_up_than_fits() -> None:
    bench = Bench(capacity=3)
    bench.keep(*keys(2))
    bench.said()
    bench.tier.mailbox.post(d.ContentsFound(keys=(*keys(2), *keys(2, "more"))))
    bench.run()
    assert bench.said() == [wire.PresenceChanged(added=keys(1, "more"), removed=())]
    (batch,) = bench.tier.batches
    assert isinstance(batch, d.RemoveBatch)
    assert batch.keys == keys(2, "more")[1:]


def test_what_a_backend_loses_is_no_longer_announced() -> None:
    bench = Bench(capacity=4)
    bench.keep(*keys(2))
    bench.said()
    bench.tier.mailbox.post(d.ContentsLost(keys=(keys(1)[0], b"never had")))
    bench.run()
    assert bench.said() == [wire.PresenceChanged(added=(), removed=keys(1))]
    bench.send(wire.Probe(probe=1, keys=keys(2)))
    assert bench.said() == [wire.ProbeAnswer(probe=1, present=(False, True))]
