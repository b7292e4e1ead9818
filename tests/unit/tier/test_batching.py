from __future__ import annotations

import pytest
from hypothesis import given, strategies

from kvtier.core import wire
from kvtier.tier.batching import BatchQueue, BlockBatch, TierJob


def keys(count: int, name: str = "k") -> tuple[bytes, ...]:
    return tuple(f"{name}{number:03}".encode() for number in range(count))


def job(*given_keys: bytes, number: int = 1) -> TierJob:
    slots = tuple(range(len(given_keys)))
    return TierJob(wire.StoreJob(job=number, request="r", keys=given_keys, slots=slots))


def start_all(queue: BatchQueue) -> list[BlockBatch]:
    batches = []
    while queue.next_key is not None:
        batches.append(queue.start_batch())
    return batches


def sizes(batches: list[BlockBatch]) -> list[int]:
    return [len(batch.keys) for batch in batches]


def run_out(queue: BatchQueue) -> list[BlockBatch]:
    """Start all batches, one whenever another ends."""
    batches = start_all(queue)
    while queue:
        queue.running -= 1
        batches += start_all(queue)
    return batches


@pytest.mark.parametrize("blocks", [1, 4, 64, 256])
def test_a_job_is_split_over_all_threads(blocks: int) -> None:
    """vLLM gives one job to one thread: 256 blocks took four steps."""
    queue = BatchQueue(4, 1, 16)
    queue.add(job(*keys(blocks)))
    batches = start_all(queue)
    assert len(batches) == min(blocks, 4)
    assert max(sizes(batches)) == min(16, -(-blocks // 4))


def test_what_waits_behind_a_first_job_is_spread_as_well() -> None:
    """One free thread is no reason to give it all: the others will be free in a moment."""
    queue = BatchQueue(8, 1, 16)
    queue.add(job(*keys(64)))
    assert sizes(start_all(queue)) == [8] * 8
    queue.add(job(*keys(96, "more")))
    queue.running -= 1
    later = run_out(queue)
    assert sizes(later) == [12, 12, 9, 9, 9, 9, 9, 9, 9, 9], "shared out, and no crumbs"


def test_a_part_is_bounded_so_that_a_load_need_not_wait_long() -> None:
    queue = BatchQueue(2, 1, 16)
    queue.add(job(*keys(100)))
    assert sizes(start_all(queue)) == [15, 15], "seven batches, of 16 at most"
    queue.running -= 1
    assert sizes(start_all(queue)) == [14]


@pytest.mark.parametrize(
    ("blocks", "batches"), [(3, [3]), (4, [4]), (7, [7]), (10, [5, 5]), (13, [5, 4, 4])]
)
def test_a_job_is_not_cut_finer_than_the_backend_wants(blocks: int, batches: list[int]) -> None:
    queue = BatchQueue(8, 4, 16)
    queue.add(job(*keys(blocks)))
    assert sizes(start_all(queue)) == batches


def busy_queue(blocks_min: int, *jobs: TierJob) -> BatchQueue:
    """Return a queue in which these wait for the only thread there is."""
    queue = BatchQueue(1, blocks_min, 16)
    queue.add(job(b"before"))
    queue.start_batch()
    for each in jobs:
        queue.add(each)
    queue.running -= 1
    return queue


def test_small_jobs_that_wait_go_together_in_order() -> None:
    queue = busy_queue(1, job(*keys(3, "a")), job(*keys(3, "b")), job(*keys(3, "c")))
    (batch,) = start_all(queue)
    assert batch.keys == keys(3, "a") + keys(3, "b") + keys(3, "c")
    assert batch.slots == (0, 1, 2) * 3
    assert [(job_slice.start, job_slice.stop) for job_slice in batch.slices] == [(0, 3)] * 3


def test_a_job_that_would_have_to_be_cut_for_it_does_not_go_with_others() -> None:
    queue = busy_queue(1, job(*keys(10, "a")), job(*keys(10, "b")), job(*keys(3, "c")))
    assert sizes(run_out(queue)) == [10, 13]


def test_a_part_has_no_key_twice() -> None:
    queue = busy_queue(1, job(b"a", b"b"), job(b"b", b"c"))
    assert [batch.keys for batch in run_out(queue)] == [(b"a", b"b"), (b"b", b"c")]


def test_a_part_ends_before_a_key_to_be_avoided() -> None:
    queue = busy_queue(1, job(b"a", b"b"), job(b"c", b"d"))
    assert queue.start_batch(avoid={b"b"}).keys == (b"a",)
    queue.running -= 1
    assert queue.next_key == b"b"
    assert queue.start_batch(avoid={b"d"}).keys == (b"b",), "what goes with others goes whole"
    queue.running -= 1
    assert queue.next_key == b"c"


@given(
    jobs=strategies.lists(strategies.integers(1, 40), min_size=1, max_size=12),
    batches_max=strategies.integers(1, 9),
    limits=strategies.tuples(strategies.integers(1, 20), strategies.integers(1, 20)).map(sorted),
    data=strategies.data(),
)
def test_every_block_is_in_one_part_in_order_and_no_part_is_too_large(
    jobs: list[int], batches_max: int, limits: list[int], data: strategies.DataObject
) -> None:
    blocks_min, blocks_max = limits
    queue = BatchQueue(batches_max, blocks_min, blocks_max)
    waiting = [job(*keys(count, f"{number}:")) for number, count in enumerate(jobs)]
    batches: list[BlockBatch] = []
    for each in waiting:
        queue.add(each)
        for _ in range(data.draw(strategies.integers(0, 3))):
            if queue.next_key is not None:
                batches.append(queue.start_batch())
            if queue.running and data.draw(strategies.booleans()):
                queue.running -= 1
    queue.running = 0
    batches += run_out(queue)
    assert [key for batch in batches for key in batch.keys] == [k for j in waiting for k in j.keys]
    assert max(sizes(batches)) <= blocks_max
    for batch in batches:
        assert batch.slots == tuple(slot for job_slice in batch.slices for slot in job_slice.slots)
    assert not queue
    assert queue.next_key is None
