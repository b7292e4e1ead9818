"""Replays of small traces: the real runtime, real threads, the real ``fs`` backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings, strategies

from kvtier.settings.runtime_config import RuntimeConfig
from kvtier.tools.replay.engine_model import EngineModel
from kvtier.tools.replay.gpu import HEAD_BYTES, Verify
from kvtier.tools.replay.player import Player
from kvtier.tools.replay.report import build_report, problems_in
from kvtier.tools.replay.report_tables import tables
from kvtier.tools.replay.session import replay
from kvtier.tools.replay.settings import ReplaySettings
from kvtier.tools.replay.traces import Trace, TraceRequest
from tests.support.examples import examples
from tests.support.patience import PATIENCE_S
from tests.unit.tools._lying import make_memory_lie

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.tools.replay.session import Replayed

pytestmark = pytest.mark.slow

BLOCK_BYTES = 8192
BLOCK_TOKENS = 16


def trace_of(prompts: Sequence[Sequence[int]], *, apart_s: float = 10.0) -> Trace:
    """Return a trace of prompts, given as numbers of blocks; the last block is a partial one."""
    requests = tuple(
        TraceRequest(
            time_s=number * apart_s,
            input_tokens=max(1, len(blocks) * BLOCK_TOKENS - 3),
            output_tokens=5,
            blocks=tuple(blocks),
        )
        for number, blocks in enumerate(prompts)
    )
    return Trace(Path("a trace"), "plain", BLOCK_TOKENS, requests)


def settings_of(
    *tiers: dict[str, Any],
    slots: int = 8,
    model: EngineModel | None = None,
    close_timeout_s: float = PATIENCE_S,
    **others: Any,
) -> ReplaySettings:
    runtime = RuntimeConfig.from_mapping(
        {
            "cascade_slots_fraction_max": 1.0,
            "close_timeout_s": close_timeout_s,
            "secondary_tiers": list(tiers),
        },
        slot_count=slots,
        block_bytes=BLOCK_BYTES,
    )
    return ReplaySettings(runtime, EngineModel() if model is None else model, **others)


def disk(folder: Path, cell: str = "thread") -> dict[str, Any]:
    threads = {"n_read_threads": 2, "n_write_threads": 2}
    return {"type": "fs", "root_dir": str(folder), "isolation": cell, **threads}


def report_of(replayed: Replayed) -> dict[str, Any]:
    """Return the report as it comes back from its file, and have its tables made."""
    report: dict[str, Any] = json.loads(
        json.dumps(build_report(replayed, {"name": "a trace"}), allow_nan=False)
    )
    assert all(len(row) == len(table.columns) for table in tables(report) for row in table.rows)
    return report


def seen_prefixes(prompts: Sequence[Sequence[int]]) -> int:
    """Return what an endless cache hits if each request ends before the next one comes."""
    seen: set[int] = set()
    hits = 0
    for blocks in prompts:
        run = 0
        while run < len(blocks) and blocks[run] in seen:
            run += 1
        hits += run
        seen.update(blocks)
    return hits


CONVERSATIONS = [
    [0, 1, 2],
    [10, 11, 12, 13],
    [0, 1, 2, 3, 4],
    [20, 21],
    [],
    [10, 11, 12, 13, 14, 15],
    [0, 1, 2, 3, 4, 5],
    [0, 1, 30],
]


def test_a_disk_behind_a_small_memory_hits_what_an_endless_cache_would(tmp_path) -> None:
    """Every hit is read and compared, from either tier."""
    replayed = replay(trace_of(CONVERSATIONS), settings_of(disk(tmp_path / "t", "process")))
    report = report_of(replayed)
    assert report["requests"]["hit_blocks"] == seen_prefixes(CONVERSATIONS)
    assert report["requests"]["referenced_blocks"] == sum(map(len, CONVERSATIONS))
    assert report["gpu"]["checked_blocks"] == seen_prefixes(CONVERSATIONS)
    primary, secondary = report["tiers"]
    assert primary["hit_blocks"] + secondary["hit_blocks"] == seen_prefixes(CONVERSATIONS)
    assert secondary["hit_blocks"] > 0
    distinct = len({block for blocks in CONVERSATIONS for block in blocks})
    assert secondary["cascaded"]["bytes"] == distinct * BLOCK_BYTES
    assert secondary["promoted"]["bytes"] == secondary["hit_blocks"] * BLOCK_BYTES
    assert secondary["cascade_s"]["count"] == distinct
    assert report["wrong_blocks"] == 0
    assert problems_in(report) == []
    assert not report["partial"]
    assert list(tmp_path.iterdir()) == []
    intervals = report["over_time"]  # add up to the whole
    for number, tier in enumerate(report["tiers"]):
        assert sum(each["hit_blocks"][number] for each in intervals) == tier["hit_blocks"]
    assert sum(each["requests"] for each in intervals) == len(CONVERSATIONS)
    assert [each["from_s"] for each in intervals] == sorted(each["from_s"] for each in intervals)
    assert intervals[-1]["resident_blocks"] == [8, distinct]


@settings(max_examples=examples(6))
@given(
    lengths=strategies.lists(
        strategies.tuples(strategies.integers(0, 3), strategies.integers(0, 12)),
        min_size=1,
        max_size=10,
    ),
    apart_s=strategies.sampled_from([0.0, 0.001, 10.0]),
    slots=strategies.integers(1, 12),
    at_once=strategies.integers(1, 4),
)
def test_every_replay_ends_at_rest_with_every_block_right(
    tmp_path_factory, lengths, apart_s, slots, at_once
) -> None:
    """However crowded: prompts longer than the memory, all at once, on one slot."""
    prompts = [[100 * head + block for block in range(length)] for head, length in lengths]
    model = EngineModel(requests_in_flight_max=at_once)
    replayed = replay(
        trace_of(prompts, apart_s=apart_s),
        settings_of(disk(tmp_path_factory.mktemp("t")), slots=slots, model=model),
    )
    report = report_of(replayed)
    assert problems_in(report) == []
    requests = report["requests"]
    assert requests["first_tokens"] == len(prompts)
    assert requests["referenced_blocks"] == sum(map(len, prompts))
    assert requests["hit_blocks"] == report["gpu"]["checked_blocks"]
    assert requests["hit_blocks"] <= seen_prefixes(prompts) or apart_s < 10
    hit_tokens = sum(tier["hit_tokens"] for tier in report["tiers"])
    computed_again = requests["computed_tokens"] + hit_tokens - requests["input_tokens"]
    assert 0 <= computed_again <= len(prompts)  # one token of a prompt that was hit as a whole
    statistics = replayed.measured.statistics.primary
    assert statistics.requests == statistics.pinned_slots == statistics.promotion_slots == 0
    assert statistics.free_slots + statistics.ready_slots == slots


def test_an_hour_of_computing_is_skipped(tmp_path) -> None:
    replayed = replay(trace_of([[0], [0, 1], [2]], apart_s=1800.0), settings_of(disk(tmp_path)))
    assert replayed.played
    assert replayed.replayed_s - replayed.real_s > 3500
    assert replayed.replayed_s > 3600


def test_with_a_speed_the_clock_is_a_real_one(tmp_path) -> None:
    model = EngineModel(speed=10_000.0)
    replayed = replay(
        trace_of([[0], [0, 1]], apart_s=300.0),
        settings_of(disk(tmp_path), model=model, jumps=False),
    )
    assert replayed.played
    assert replayed.replayed_s >= 300.0 / 10_000
    assert replayed.real_s <= replayed.replayed_s < replayed.real_s + 300.0


def test_without_hits_no_token_is_earlier_than_without_offloading(tmp_path) -> None:
    """Then kvtier can only cost: the time is the stated one and what waiting adds."""
    model = EngineModel(prefill_tokens_per_s=100.0, requests_in_flight_max=2)
    trace = trace_of([[10 * n, 10 * n + 1] for n in range(5)], apart_s=0.1)
    replayed = replay(trace, settings_of(disk(tmp_path), model=model))
    without = model.first_tokens_without_offloading(trace.requests)
    with_kvtier = list(replayed.measured.first_token.seconds)
    assert len(with_kvtier) == len(without)
    assert all(a >= b - 1e-9 for a, b in zip(with_kvtier, without, strict=True))
    assert replayed.measured.computed_tokens == replayed.measured.input_tokens


MEMORY = {"type": "memory", "capacity_bytes": 64 * BLOCK_BYTES}


def test_wrong_bytes_are_found_and_their_place_is_named(monkeypatch) -> None:
    make_memory_lie(monkeypatch, 5001)
    replayed = replay(trace_of(CONVERSATIONS), settings_of(MEMORY))
    report = report_of(replayed)
    promoted = report["tiers"][1]["hit_blocks"]
    assert report["wrong_blocks"] >= promoted > 0
    assert {each["source"] for each in report["wrong"]} >= {"1:memory"}
    assert {each["offset_bytes"] for each in report["wrong"]} == {5000}
    first, second, *_ = problems_in(report)
    assert "wrong bytes" in first
    assert "from 1:memory, slot " in second
    assert "byte 5000 on" in second


def test_a_slot_that_is_harmed_after_its_promotion_is_found(monkeypatch) -> None:
    """What no check on the way can see: only the reader's own."""
    from kvtier.tools.replay.gpu import StandInGpu

    real = StandInGpu.load

    def load(self, keys, slots):
        self.memory.view(slots[0])[BLOCK_BYTES - 1] ^= 128
        return real(self, keys, slots)

    monkeypatch.setattr(StandInGpu, "load", load)
    report = report_of(replay(trace_of([[0, 1], [0, 1]]), settings_of(MEMORY)))
    assert report["wrong_blocks"] == 1
    (wrong,) = report["wrong"]
    assert wrong["source"] == "0:primary"
    assert wrong["request"] == "r2"
    assert wrong["offset_bytes"] == BLOCK_BYTES - 8


@pytest.mark.parametrize(
    ("verify", "at_byte", "is_found"),
    [
        (Verify.FULL, BLOCK_BYTES - 1, True),
        (Verify.HEAD, HEAD_BYTES - 1, True),
        (Verify.HEAD, HEAD_BYTES, False),
        (Verify.OFF, 0, False),
    ],
)
def test_each_way_of_verifying_compares_what_it_says(
    monkeypatch, verify, at_byte, is_found
) -> None:
    make_memory_lie(monkeypatch, at_byte)
    report = report_of(replay(trace_of(CONVERSATIONS), settings_of(MEMORY, verify=verify)))
    assert bool(report["wrong_blocks"]) is is_found
    assert (report["gpu"]["checked_blocks"] == 0) is (verify is Verify.OFF)


@pytest.mark.parametrize("first_tokens", [0, 1])
def test_a_replay_that_is_stopped_leaves_a_partial_report_and_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_tokens: int
) -> None:
    counted: list[float] = []
    count = Player._count

    def note(self: Player, request: Any, at: float) -> None:
        count(self, request, at)
        counted.append(at)

    monkeypatch.setattr(Player, "_count", note)
    replayed = replay(
        trace_of(CONVERSATIONS),
        settings_of(disk(tmp_path / "made/here")),
        should_stop=lambda: len(counted) >= first_tokens,
    )
    report = report_of(replayed)
    assert report["partial"]
    assert report["requests"]["first_tokens"] < len(CONVERSATIONS)
    assert (report["first_token_s"]["with_kvtier"]["p50"] is None) is (not first_tokens)
    assert problems_in(report) == []
    assert list(tmp_path.iterdir()) == []


def test_kept_blocks_are_hits_of_the_next_replay_of_the_same_trace(tmp_path) -> None:
    trace = trace_of([[0, 1, 2]])
    first = replay(trace, settings_of(disk(tmp_path), keep=True))
    again = replay(trace, settings_of(disk(tmp_path), keep=True))
    assert first.measured.hit_blocks == [0, 0]
    assert again.measured.hit_blocks == [0, 3]
    assert again.measured.wrong_blocks == 0
    other = replay(trace_of([[0, 1, 3]]), settings_of(disk(tmp_path), keep=True))
    assert other.measured.hit_blocks == [0, 0]


def test_a_tier_that_hangs_costs_hits_and_ends_nothing() -> None:
    """Deadlines are real, so the replay waits for them and goes on."""
    hung = {
        **MEMORY,
        "faults": {"load": {"hang": True}},
        "promote_timeout_s": 0.05,
    }
    report = report_of(replay(trace_of(CONVERSATIONS), settings_of(hung, close_timeout_s=0.1)))
    assert not report["partial"]
    assert report["tiers"][1]["hit_blocks"] == 0
    assert report["tiers"][1]["counts"]["jobs_timed_out"] > 0
    assert problems_in(report) == []
