"""A tier behind another program's primary tier: its jobs, its slots, its staging slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvtier import Namespace, RuntimeConfig, SlotMemory
from kvtier.core import messages as m
from kvtier.core import wire
from kvtier.core.block_state import BlockState
from kvtier.runtime import open_staged_tier
from kvtier.settings.secondary_tier import read_secondary_tier
from tests.support.patience import until
from tests.support.patient_limits import _patient_limits  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.engine.staged.staged_facade import StagedFacade
    from kvtier.engine.staged.staged_job import Finished

BLOCK = 4096
SLOTS = 16  #: of the program
COUNT = 8
KEYS = tuple(bytes([number]) * 36 for number in range(COUNT))
SOON = 0.02
HANG = {"hang": True}


class Program:
    """The other program: its slots, its jobs, its clock."""

    def __init__(self, faults: dict[str, Any], **options: Any) -> None:
        tier_options = {
            name: options.pop(name)
            for name in ("promote_timeout_s", "store_timeout_s", "probe_timeout_s")
            if name in options
        }
        tier = options.pop("tier", None) or {
            "type": "memory",
            "capacity_bytes": 1 << 20,
            "faults": faults,
            **tier_options,
        }
        config = read_secondary_tier({"tier": tier, **options}, slot_count=SLOTS, block_bytes=BLOCK)
        self.now = 0.0
        self.memory = SlotMemory.anonymous(SLOTS, BLOCK)
        self.bytes = memoryview(self.memory.buffer)
        self.facade: StagedFacade = open_staged_tier(
            config,
            self.memory,
            SlotMemory.anonymous(config.slot_count, BLOCK),
            Namespace({"model": "m"}),
            clock=lambda: self.now,
        )
        self.jobs = 0
        self.finished: dict[int, Finished] = {}

    def fill(self, slot: int, value: int) -> None:
        self.memory.view(slot)[:] = bytes([value]) * BLOCK

    def holds(self, slot: int, value: int) -> bool:
        return bytes(self.memory.view(slot)) == bytes([value]) * BLOCK

    def take(self) -> None:
        for each in self.facade.drain_finished():
            assert each.job not in self.finished, "a job was finished twice"
            self.finished[each.job] = each
        self.facade.step_end()

    def until_finished(self, job: int) -> Finished:
        until(lambda: self.take() or job in self.finished)
        return self.finished[job]

    def store(self, keys: tuple[bytes, ...]) -> int:
        for slot, key in enumerate(keys):
            self.fill(slot, key[0])
        self.jobs += 1
        self.facade.submit_store(self.jobs, "r", keys, range(len(keys)))
        self.facade.step_end()
        return self.jobs

    def load(self, keys: tuple[bytes, ...]) -> int:
        for slot in range(len(keys)):
            self.fill(slot, 255)
        self.jobs += 1
        self.facade.submit_load(self.jobs, "r", keys, range(len(keys)))
        self.facade.step_end()
        return self.jobs

    def find(self, key: bytes, request: str = "r") -> BlockState:
        probing = BlockState.PROBING
        until(lambda: self.facade.lookup(key, request) is not probing or self.take())
        return self.facade.lookup(key, request)

    def at_rest(self) -> bool:
        self.take()
        staging = self.facade.statistics().primary
        is_idle = staging.free_slots + staging.ready_slots == staging.slot_count
        return is_idle and not staging.pinned_slots and not self.facade._copies


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    faults, options = getattr(request, "param", ({}, {}))
    made = Program(faults, **options)
    made.facade.on_request_started("r")
    try:
        yield made
    finally:
        made.bytes.release()
        made.facade.close()


def given(faults: dict[str, Any] | None = None, **options: Any) -> pytest.MarkDecorator:
    """Run the test with this tier."""
    options.setdefault("close_timeout_s", SOON)
    return pytest.mark.parametrize("program", [(faults or {}, options)], indirect=True)


def test_what_was_stored_is_loaded_again(program: Program) -> None:
    stored = program.until_finished(program.store(KEYS))
    assert (stored.failed, stored.moved) == ([], COUNT)
    assert program.find(KEYS[3]) is BlockState.READY
    assert program.facade.lookup(KEYS[0], "unknown") is BlockState.ABSENT
    loaded = program.until_finished(program.load(KEYS))
    assert (loaded.failed, loaded.moved) == ([], COUNT)
    assert all(program.holds(slot, slot) for slot in range(COUNT))
    assert program.at_rest()
    assert program.facade.statistics().tiers[0].counts.read_bytes == COUNT * BLOCK


def test_a_tier_that_is_read_only_ends_stores_without_a_copy(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    program = Program({}, tier={"type": "fs", "root_dir": str(tmp_path), "read_only": True})
    try:
        program.facade.on_request_started("r")
        assert not program.until_finished(program.store(KEYS)).failed
        assert program.at_rest()
        assert program.find(KEYS[0]) is BlockState.ABSENT
        assert list(tmp_path.iterdir()) == []
    finally:
        program.bytes.release()
        program.facade.close()


def test_what_the_tier_has_is_not_written_again(program: Program) -> None:
    program.until_finished(program.store(KEYS[:3]))
    again = program.until_finished(program.store(KEYS[:4]))
    assert (again.failed, again.moved) == ([], 1)


@given(staging_bytes=3 * BLOCK)
def test_a_job_may_be_longer_than_there_are_staging_slots(program: Program) -> None:
    assert program.until_finished(program.store(KEYS)).moved == COUNT
    assert program.until_finished(program.load(KEYS)).moved == COUNT
    assert all(program.holds(slot, slot) for slot in range(COUNT))
    assert program.at_rest()
    assert program.facade.statistics().primary.ready_slots == 0  # nothing is cached there


@given(staging_bytes=3 * BLOCK)
def test_loads_share_fewer_staging_slots_than_one_of_them_needs(program: Program) -> None:
    program.until_finished(program.store(KEYS))
    jobs = []
    for first in (0, COUNT):
        slots = range(first, first + COUNT)
        program.facade.submit_load(100 + first, "r", KEYS, slots)
        jobs.append(100 + first)
    program.facade.step_end()
    assert [program.until_finished(job).failed for job in jobs] == [[], []]
    assert all(program.holds(slot, slot % COUNT) for slot in range(SLOTS))


@given(staging_bytes=3 * BLOCK)
def test_a_load_that_waits_for_room_lets_a_later_one_end(program: Program) -> None:
    """The tier is asked for the first one's block, while the second takes the room."""
    program.until_finished(program.store(KEYS[:3]))
    lose(program, KEYS[:1])
    program.facade.submit_load(100, "r", KEYS[:1], [0])
    program.facade.submit_load(101, "r", KEYS[1:3], [1, 2])
    program.facade.step_end()
    assert [program.until_finished(job).failed for job in (100, 101)] == [[], []]


def lose(program: Program, keys: tuple[bytes, ...]) -> None:
    """Have the tier report that it has these blocks no more."""
    (link,) = program.facade._runtime._links
    link.receive(wire.PresenceChanged((), keys, link.contents.since))
    program.take()


@given({"load": {"delay_s": SOON}}, staging_bytes=3 * BLOCK)
def test_a_load_goes_on_when_its_request_has_ended(program: Program) -> None:
    program.until_finished(program.store(KEYS))
    job = program.load(KEYS)
    program.facade.on_request_finished("r")
    assert program.until_finished(job).failed == []
    assert program.find(KEYS[0]) is BlockState.ABSENT  # it has ended


def test_a_load_may_be_of_a_request_that_has_ended(program: Program) -> None:
    """vLLM submits what was looked up in a step at its end."""
    program.until_finished(program.store(KEYS))
    program.facade.on_request_finished("r")
    assert program.until_finished(program.load(KEYS)).failed == []
    assert program.facade.statistics().primary.requests == 0


def arrive_late(program: Program) -> None:
    """Have the first block arrive once its job has failed: somebody else may have its slot."""
    job = program.load(KEYS[:1])
    program.now = 5.0
    assert program.until_finished(job).failed
    until(lambda: program.take() or program.facade.statistics().primary.ready_slots)
    assert program.holds(0, 255)


@given({"load": {"delay_s": SOON, "calls_max": 1}}, promote_timeout_s=5.0, staging_bytes=BLOCK)
def test_what_came_late_leaves_the_staging_slots_to_other_loads(program: Program) -> None:
    program.until_finished(program.store(KEYS[:2]))
    arrive_late(program)
    program.now = 100.0  # the tier's pause is over
    program.take()
    program.facade.submit_load(100, "r", KEYS[1:2], [1])
    assert program.until_finished(100).failed == []
    assert program.facade.statistics().primary.counts.policies_replaced == 0


@given({"load": {"delay_s": SOON, "calls_max": 1}}, promote_timeout_s=5.0)
def test_what_came_late_is_stored_again_if_the_tier_has_lost_it(program: Program) -> None:
    program.until_finished(program.store(KEYS[:1]))
    arrive_late(program)
    lose(program, KEYS[:1])
    assert program.until_finished(program.store(KEYS[:1])).moved == 1


@given({"load": {"corrupt_every": 2}})
def test_damaged_blocks_fail_and_their_slots_keep_what_was_in_them(program: Program) -> None:
    program.until_finished(program.store(KEYS))
    loaded = program.until_finished(program.load(KEYS))
    assert len(loaded.failed) == len(loaded.succeeded) == COUNT // 2
    for slot, key in enumerate(KEYS):
        assert program.holds(slot, 255 if key in loaded.failed else slot)
    assert program.find(loaded.failed[0]) is BlockState.ABSENT  # not to be tried for ever


@given(
    {"load": HANG, "store": {**HANG, "calls_skipped": 4}},
    promote_timeout_s=5.0,
    store_timeout_s=5.0,
)
@pytest.mark.parametrize("kind", ["load", "store"])
@pytest.mark.parametrize("end", ["deadline", "drain"])
def test_every_job_of_a_tier_that_hangs_ends_and_its_staging_slots_stay_the_tiers(
    program: Program, kind: str, end: str
) -> None:
    program.until_finished(program.store(KEYS[:4]))
    job = program.load(KEYS[:4]) if kind == "load" else program.store(KEYS[4:])
    program.now = 4.9
    program.take()
    assert job not in program.finished
    if end == "drain":
        program.facade.drain()
    else:
        program.now = 5.0
        program.take()
    program.take()
    assert len(program.finished[job].failed) == 4
    assert not program.at_rest()
    if kind == "load":
        assert program.find(KEYS[0]) is BlockState.ABSENT


@given({"store": {"delay_s": SOON}})
def test_a_store_writes_the_bytes_that_there_were_when_it_was_copied(program: Program) -> None:
    """Its slots may be somebody else's while the tier still reads."""
    program.store(KEYS)
    program.facade._copier.wait_idle()
    program.facade.drain_finished()  # the copies have ended, the store has begun
    program.facade.step_end()
    for slot in range(COUNT):
        program.fill(slot, 99)
    until(program.at_rest)
    loaded = program.until_finished(program.load(KEYS))
    assert not loaded.failed
    assert all(program.holds(slot, slot) for slot in range(COUNT))


def test_a_copy_that_fails_fails_its_blocks(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.until_finished(program.store(KEYS))
    monkeypatch.setattr("kvtier.hosts.copier._check", lambda _work: 1 / 0)
    assert program.until_finished(program.load(KEYS)).failed == list(KEYS)
    until(program.at_rest)
    assert program.find(KEYS[0]) is BlockState.ABSENT  # not to be tried for ever


def test_after_a_reset_nothing_of_before_is_found(program: Program) -> None:
    program.until_finished(program.store(KEYS))
    program.facade.drain()
    program.facade.reset()
    assert program.find(KEYS[0]) is BlockState.ABSENT
    # What a request from before goes on to store, older weights computed.
    job = program.until_finished(program.store(KEYS[:2]))
    assert (job.moved, job.failed) == (2, [])  # it has looked up since: it begins anew


@given({"load": {"error": "broken"}}, on_reset="keep")
def test_a_reset_that_keeps_blocks_keeps_what_a_request_could_not_load(program: Program) -> None:
    program.until_finished(program.store(KEYS[:1]))
    assert program.find(KEYS[0]) is BlockState.READY
    assert program.until_finished(program.load(KEYS[:1])).failed
    program.facade.drain()
    program.facade.reset()
    assert program.find(KEYS[0]) is BlockState.ABSENT


def test_a_request_from_before_a_reset_stores_nothing(program: Program) -> None:
    program.facade.drain()
    program.facade.reset()
    assert program.until_finished(program.store(KEYS)).moved == 0
    program.facade.on_request_started("s")
    assert program.find(KEYS[0], "s") is BlockState.ABSENT


@given({"store": {"error": "broken"}}, breaker_failures_max=1)
def test_a_tier_that_is_bypassed_fails_jobs_at_once(program: Program) -> None:
    assert program.until_finished(program.store(KEYS)).failed == list(KEYS)
    job = program.store(KEYS)
    program.take()
    assert program.finished[job].failed == list(KEYS)
    assert program.find(KEYS[0]) is BlockState.ABSENT


def test_a_load_fails_if_the_primary_tier_breaks_in_it(program: Program) -> None:
    program.until_finished(program.store(KEYS))
    program.facade._runtime._primary.handlers[m.PrepareLoad] = lambda _: 1 / 0
    assert program.until_finished(program.load(KEYS)).failed == list(KEYS)


@given({"load": HANG})
def test_jobs_end_when_the_actor_breaks(program: Program) -> None:
    program.until_finished(program.store(KEYS))
    job = program.load(KEYS)
    program.facade._runtime._primary.stop()
    program.take()
    assert program.finished[job].failed
    assert program.facade.lookup(KEYS[0], "r") is BlockState.ABSENT
    program.facade.drain()


def test_jobs_end_when_the_tiers_link_breaks(program: Program) -> None:
    program.until_finished(program.store(KEYS))

    def broken(_message: object) -> None:
        raise RuntimeError("planted")

    program.facade._runtime._links[0].handlers[m.Promote] = broken
    job = program.load(KEYS)
    program.take()
    assert program.finished[job].failed == list(KEYS)
    assert program.find(KEYS[0]) is BlockState.ABSENT
    assert program.until_finished(program.store(KEYS)).moved == 0
    assert program.facade.statistics().faults == 1


def test_a_primary_tiers_options_are_refused() -> None:
    tier = {"type": "memory", "capacity_bytes": 1 << 20}
    config = read_secondary_tier({"tier": tier}, slot_count=1600, block_bytes=BLOCK, number=2)
    assert isinstance(config, RuntimeConfig)
    assert config.slot_count == 100
    assert config.tiers[0].name == "2:memory"
