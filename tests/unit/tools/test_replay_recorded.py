"""Replays of records: what they repeat of the engine's run, and what they find by themselves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.tools.replay.engine_model import EngineModel
from kvtier.tools.replay.report import build_report
from kvtier.tools.replay.report_tables import tables
from kvtier.tools.replay.session import replay
from kvtier.tools.replay.traces import Recorded, Trace, TraceEvent, TraceRequest
from tests.unit.tools.test_replay_player import BLOCK_TOKENS, MEMORY, settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.slow


def request(time_s: float, blocks: Sequence[int], **fields: Any) -> TraceRequest:
    return TraceRequest(time_s, len(blocks) * BLOCK_TOKENS + 3, 0, tuple(blocks), **fields)


def record(*requests: TraceRequest, events: Sequence[TraceEvent] = (), **outcome: Any) -> Trace:
    recorded = Recorded(events=tuple(events), **outcome)
    return Trace(Path("a record"), "recorded", BLOCK_TOKENS, requests, recorded=recorded)


def hits_of(trace: Trace, *tiers: dict[str, Any], **settings: Any) -> list[int]:
    """Return the blocks that were hits, by tier."""
    return replay(trace, settings_of(*tiers, **settings)).measured.hit_blocks


def test_a_request_without_an_answer_stores_its_prompt() -> None:
    """It ended in the step of its first token, and that was before its blocks had been stored."""
    assert hits_of(record(request(0, [0, 1]), request(9, [0, 1]))) == [2]


def test_what_the_gpu_had_is_no_hit_but_it_is_stored() -> None:
    """As vLLM does, unless the request also loads: kvtier may have evicted it meanwhile."""
    half = BLOCK_TOKENS // 2
    trace = record(
        request(0, [0, 1, 2], gpu_tokens=2 * BLOCK_TOKENS),
        request(9, [0, 1, 2], gpu_tokens=BLOCK_TOKENS + half),
    )
    report = build_report(replay(trace, settings_of()), {})
    assert report["requests"] == {
        "first_tokens": 2,
        "input_tokens": 6 * BLOCK_TOKENS + 6,
        "gpu_blocks": 3,
        "gpu_tokens": 3 * BLOCK_TOKENS + half,
        "computed_tokens": BLOCK_TOKENS + 6,
        "referenced_blocks": 6,
        "hit_blocks": 2,
        "hit_ratio": 2 / 6,
    }
    assert report["tiers"][0]["hit_tokens"] == BLOCK_TOKENS + half


def test_a_tier_that_was_down_is_asked_for_nothing_and_has_its_blocks_later() -> None:
    """Three slots, of which promotions get two: the tier has to have what is asked for again."""
    requests = request(0, [0, 1, 2]), request(10, [3, 4, 5]), request(20, [0, 1, 2])
    requests += (request(30, [3, 4, 5]),)
    down = TraceEvent(15, "tier_down", "1:memory", "loads")
    up = TraceEvent(25, "tier_up", "1:memory", "loads")
    foreign = TraceEvent(15, "tier_down", "1:another", "loads")
    small = {"slots": 3}
    assert hits_of(record(*requests, events=[foreign]), MEMORY, **small) == [0, 4]
    assert hits_of(record(*requests, events=[down]), MEMORY, **small) == [0, 0]
    assert hits_of(record(*requests, events=[down, up]), MEMORY, **small) == [0, 2]


def test_what_a_tier_missed_while_it_was_down_it_gets_later() -> None:
    """As from a tier that has failed: from host memory, if that still has it."""
    down = TraceEvent(-1, "tier_down", "1:memory", "stores")
    up = TraceEvent(5, "tier_up", "1:memory", "stores")
    requests = request(0, [0, 1]), request(10, [2]), request(20, [3, 4, 5]), request(30, [0, 1])
    assert hits_of(record(*requests, events=[down, up]), MEMORY, slots=3) == [0, 2]
    assert hits_of(record(*requests, events=[down]), MEMORY, slots=3) == [0, 0]


def test_a_reset_of_the_engine_empties_the_tiers_of_the_replay() -> None:
    requests = request(0, [0, 1]), request(10, [0, 1]), request(20, [0, 1])
    reset = TraceEvent(5, "reset")
    assert hits_of(record(*requests, events=[reset]), MEMORY) == [2, 0]
    assert hits_of(record(*requests), MEMORY) == [4, 0]


@pytest.mark.parametrize(("ended_s", "waits"), [(1.0, True), (2.0, False)])
def test_a_request_waits_for_those_that_had_ended_when_it_came(ended_s: float, waits: bool) -> None:
    """Its client may have waited for them, and a replay may take longer than the engine did."""
    slow = EngineModel(prefill_tokens_per_s=BLOCK_TOKENS / 400)
    trace = record(request(0, [0, 1], ended_s=ended_s), request(1.5, [0, 1], ended_s=9.0))
    measured = replay(trace, settings_of(model=slow)).measured
    assert (measured.entering.seconds[1] > 100) is waits
    assert measured.hit_blocks == [2], "else it waits for the blocks that are computed"


def test_an_answer_takes_the_time_that_it_took() -> None:
    trace = record(request(0, [0], ended_s=100.0), request(50, [1], ended_s=60.0))
    assert replay(trace, settings_of()).replayed_s == pytest.approx(100.0, abs=5.0)


def test_the_recorded_outcome_stands_beside_the_replays() -> None:
    tokens = {"0:primary": 12345, "gone": 600}
    trace = record(request(0, [0, 1]), gpu_tokens=777, loaded_tokens=tokens, computed_tokens=54321)
    hits = tables(build_report(replay(trace, settings_of()), {}))[0]
    assert hits.columns[-1] == "recorded tokens"
    assert {row[0]: row[-1] for row in hits.rows} == {
        "0:primary": "12,345",
        "all hits": "12,945",
        "in the GPU's prefix cache": "777",
        "computed": "54,321",
    }
    plain = replay(replace(trace, recorded=None), settings_of())
    assert tables(build_report(plain, {}))[0].columns[-1] == "tokens"
