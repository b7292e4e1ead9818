"""What the trace reader promises: it reads four formats, and names what it cannot read."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies

from kvtier.tools.replay import trace_lines, traces
from kvtier.tools.replay.traces import (
    Recorded,
    Trace,
    TraceError,
    TraceEvent,
    TraceRequest,
    read_trace,
)
from tests.support.printed import printed

if TYPE_CHECKING:
    from pathlib import Path


def mooncake(time_ms: float, ids: list[int], **changes: Any) -> dict[str, Any]:
    fields = {
        "timestamp": time_ms,
        "input_length": 512 * len(ids),
        "output_length": 7,
        "hash_ids": ids,
    }
    return fields | changes


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read(tmp_path: Path, raw: bytes, **options: Any) -> Trace:
    path = tmp_path / "trace"
    path.write_bytes(raw)
    return read_trace(path, **options)


def test_mooncake_is_read_by_its_fields(tmp_path: Path) -> None:
    trace = read(tmp_path, lines(mooncake(5000, [4, 9]), mooncake(6500, [4, 2, 3])))
    assert trace.format == "mooncake"
    assert trace.block_tokens == 512
    assert trace.requests == (
        TraceRequest(0.0, 1024, 7, (0, 1)),
        TraceRequest(1.5, 1536, 7, (0, 2, 3)),
    )
    assert (trace.references, trace.distinct_blocks) == (5, 4)


def test_qwen_bailian_is_told_from_mooncake(tmp_path: Path) -> None:
    """Its times are in seconds and its blocks have 16 tokens; both have hash_ids."""
    row = {
        "chat_id": 159,
        "parent_chat_id": -1,
        "timestamp": 61.25,
        "input_length": 33,
        "output_length": 132,
        "type": "text",
        "turn": 1,
        "hash_ids": [1089, 1090, 6326],
    }
    later = {**row, "timestamp": 62.5}
    del later["turn"]
    trace = read(tmp_path, lines(row, later))
    assert (trace.format, trace.block_tokens) == ("qwen-bailian", 16)
    assert trace.requests[1] == TraceRequest(1.25, 33, 132, (0, 1, 2))


def test_plain_needs_three_fields(tmp_path: Path) -> None:
    trace = read(tmp_path, b'{"time_s": 1, "tokens": 40, "blocks": [1, 2, 3]}\n')
    assert (trace.format, trace.block_tokens) == ("plain", 16)
    assert trace.requests == (TraceRequest(0.0, 40, 0, (0, 1, 2)),)


def test_a_block_is_another_one_behind_another_prefix(tmp_path: Path) -> None:
    """Qwen-Bailian's ids name a block's own tokens: no prefix cache could serve the second 7."""
    trace = read(tmp_path, lines(mooncake(0, [1, 7]), mooncake(0, [2, 7]), mooncake(0, [2, 7, 7])))
    assert [request.blocks for request in trace.requests] == [(0, 1), (2, 3), (2, 3, 4)]


@given(
    strategies.lists(
        strategies.lists(strategies.integers(0, 3), max_size=5), min_size=1, max_size=12
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_equal_numbers_mean_equal_prefixes(tmp_path: Path, requests: list[list[int]]) -> None:
    trace = read(tmp_path, lines(*(mooncake(0, ids) for ids in requests)))
    prefix_of: dict[int, tuple[int, ...]] = {}
    for ids, request in zip(requests, trace.requests, strict=True):
        for depth, block in enumerate(request.blocks):
            assert prefix_of.setdefault(block, tuple(ids[: depth + 1])) == tuple(ids[: depth + 1])
    assert len(set(prefix_of.values())) == len(prefix_of) == trace.distinct_blocks


def test_the_partial_last_block_may_be_named_or_left_out(tmp_path: Path) -> None:
    """Mooncake names it, others do not. A block may be said to have another size."""
    rows = [mooncake(0, [1, 2], input_length=700), mooncake(0, [1], input_length=700)]
    assert [len(request.blocks) for request in read(tmp_path, lines(*rows)).requests] == [2, 1]
    trace = read(tmp_path, lines(mooncake(0, [1, 2, 3, 4], input_length=64)), block_tokens=16)
    assert (trace.block_tokens, trace.references) == (16, 4)


BAD = {
    b"nonsense": "not JSON",
    b'{"timestamp": 0, ': "not JSON",
    b"[1, 2]": "got `array`",
    b'{"hash_ids": [1], "x": "\xff"}': "not UTF-8",
    b'{"a": 1}': "no known format",
    b'{"hash_ids": [], "timestamp": 0, "input_length": 0}': "output_length",
    lines(mooncake(0, [1], timestamp="now")): "timestamp",
    lines(mooncake(0, [1], timestamp=-1)): "timestamp",
    lines(mooncake(0, [1], timestamp=float("nan"))): "not JSON",
    lines(mooncake(0, [1], timestamp=1e300)): "timestamp",
    lines(mooncake(0, [1], input_length=512.5)): "input_length",
    lines(mooncake(0, [1], input_length=True)): "input_length",
    lines(mooncake(0, [1], input_length=10**30)): "input_length",
    lines(mooncake(0, [1], output_length=-1)): "output_length",
    lines(mooncake(0, [1], hash_ids=None)): "hash_ids",
    lines(mooncake(0, [1], hash_ids=["1"])): "hash_ids",
    lines(mooncake(0, [-1])): "negative",
    lines(mooncake(0, [2**64])): "64 bits",
    lines(mooncake(0, [1], input_length=5000)): "1 ids, but 5,000 tokens make 10 blocks",
    lines(mooncake(0, [1, 2, 3, 4], input_length=64)): "blocks of 16 tokens would fit",
    lines(mooncake(0, [1], deep=0)).replace(b"0}", b"[" * 10**5 + b"]" * 10**5 + b"}"): "deep",
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_line_is_named_with_what_is_wrong_or_skipped_and_counted(
    tmp_path: Path, bad: bytes
) -> None:
    """A bad first line does not keep the format from being found on the second."""
    raw = bad.rstrip() + b"\n" + lines(mooncake(0, [1]), mooncake(1, [1]))
    with pytest.raises(TraceError, match="trace: line 2: ") as caught:
        read(tmp_path, b"\n" + raw)
    assert BAD[bad] in str(caught.value)
    trace = read(tmp_path, raw, on_bad_line="skip")
    assert (len(trace.requests), trace.bad_line_count) == (2, 1)
    ((number, what),) = trace.bad_lines
    assert number == 1
    assert BAD[bad] in what


def test_only_so_many_bad_lines_are_kept(tmp_path: Path) -> None:
    trace = read(tmp_path, lines(mooncake(0, [1])) + b"x\n" * 3000, on_bad_line="skip")
    assert trace.bad_line_count == 3000
    assert len(trace.bad_lines) == trace_lines.BAD_LINES_KEPT_MAX


def test_a_huge_line_costs_bounded_memory(tmp_path: Path) -> None:
    """A gzip bomb: a line of 128 MiB in an eighth of a megabyte, and a request behind it."""
    bomb = gzip.compress(b" " * 2**27 + b"\n" + lines(mooncake(0, [1])), compresslevel=1)
    tracemalloc.start()
    try:
        trace = read(tmp_path, bomb, on_bad_line="skip")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert trace.bad_lines == ((1, "it is longer than 16 MiB"),)
    assert len(trace.requests) == 1
    assert peak < 5 * trace_lines.LINE_BYTES_MAX


@pytest.mark.parametrize("damage", ["cut", "overwritten", "followed"])
def test_damaged_gzip_is_named_and_what_came_before_is_kept(tmp_path: Path, damage: str) -> None:
    whole = gzip.compress(lines(*(mooncake(n, [n]) for n in range(20_000))))
    middle = len(whole) // 2
    raw = {
        "cut": whole[:middle],
        "overwritten": whole[:middle] + b"\0" * 64 + whole[middle + 64 :],
        "followed": whole + b"junk",
    }[damage]
    with pytest.raises(TraceError, match=r"line [0-9]+: "):
        read(tmp_path, raw)
    trace = read(tmp_path, raw, on_bad_line="skip")
    assert 1000 < len(trace.requests) <= 20_000
    assert any("gzip" in what for _, what in trace.bad_lines)


def test_requests_are_sorted_by_time_and_the_unsorted_counted(tmp_path: Path) -> None:
    """Servers may log a request when it ends. Equal times keep their order."""
    rows = [mooncake(3000, [1]), mooncake(1000, [2]), mooncake(3000, [3]), mooncake(2000, [4])]
    trace = read(tmp_path, lines(*rows))
    assert [(r.time_s, r.blocks) for r in trace.requests] == [
        (0.0, (1,)),
        (1.0, (3,)),
        (2.0, (0,)),
        (2.0, (2,)),
    ]
    assert trace.out_of_order_count == 2


def test_a_time_that_is_a_year_off_is_a_bad_line(tmp_path: Path) -> None:
    """Sorted in, it would stretch the trace by decades."""
    with pytest.raises(TraceError, match=r"line 2: its time is 1e.* are in milliseconds"):
        read(tmp_path, lines(mooncake(0, [1]), mooncake(10**13, [1])))


def test_limit_stops_before_what_is_bad_behind_it(tmp_path: Path) -> None:
    trace = read(tmp_path, lines(mooncake(0, [1]), mooncake(1, [1])) + b"x\n", limit=2)
    assert len(trace.requests) == 2


def test_carriage_returns_byte_order_marks_and_a_missing_last_newline_are_fine(
    tmp_path: Path,
) -> None:
    raw = b"\xef\xbb\xbf" + lines(mooncake(0, [1]), mooncake(1, [1])).replace(b"\n", b"\r\n")
    assert len(read(tmp_path, raw.rstrip()).requests) == 2


@pytest.mark.parametrize("raw", [b"", b"\n \n", gzip.compress(b"", mtime=0)])
def test_an_empty_trace_is_refused(tmp_path: Path, raw: bytes) -> None:
    with pytest.raises(TraceError, match="holds no request"):
        read(tmp_path, raw)


def test_a_trace_of_bad_lines_only_is_refused_with_the_first_of_them(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds no request.*Line 1: it is not JSON"):
        read(tmp_path, b"x\ny\n", on_bad_line="skip")


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="absent: cannot be read: No such file"):
        read_trace(tmp_path / "absent")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    "options", [{"format": "csv"}, {"block_tokens": 0}, {"on_bad_line": "fix"}, {"limit": 0}]
)
def test_wrong_arguments_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(TraceError, match=name):
        read(tmp_path, lines(mooncake(0, [1])), **options)


@pytest.mark.parametrize(("bound", "value"), [("REQUESTS_MAX", 3), ("REFERENCES_MAX", 7)])
def test_too_many_requests_or_references_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(traces, bound, value)
    raw = lines(*(mooncake(0, [1, 2]) for _ in range(4)))
    with pytest.raises(TraceError, match="Set --limit"):
        read(tmp_path, raw)
    assert len(read(tmp_path, raw, limit=3).requests) == 3


def test_progress_is_told_in_bytes_of_the_file(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    raw = lines(*(mooncake(0, [1]) for _ in range(2000)))
    read(tmp_path, raw, on_progress=lambda done, size: told.append((done, size)))
    assert len(told) == 4
    assert all(0 < done <= size == len(raw) for done, size in told)


RECORDED = {
    "time_s": 5,
    "ended_s": 7.5,
    "tokens": 40,
    "blocks": [7, 8],
    "gpu_tokens": 16,
    "loaded_tokens": {"0:primary": 16},
    "computed_tokens": 8,
}
DOWN = {"event": "tier_down", "time_s": 4, "tier": "1:fs", "work": "loads"}

FRAGMENTS = strategies.sampled_from(
    [
        *(bad.rstrip()[:300] for bad in BAD),
        lines(mooncake(0, [1])),
        lines(mooncake(9e9, [1, 2])),
        b'{"time_s": 0, "tokens": 16, "blocks": [1]}\n',
        b'{"kvtier_record":1,"block_tokens":16}\n',
        json.dumps(DOWN, separators=(",", ":")).encode() + b"\n",
        lines(RECORDED),
        b"\n",
        b"9" * 5000,
        b"[",
        b'{"hash_ids":',
        b"\x1f\x8b",
        gzip.compress(lines(mooncake(0, [1])), mtime=0)[:-4],
    ]
)


@given(
    parts=strategies.lists(FRAGMENTS | strategies.binary(max_size=40), max_size=8),
    packed=strategies.booleans(),
    on_bad_line=strategies.sampled_from(["stop", "skip"]),
    name=strategies.sampled_from(["auto", *trace_lines.FORMATS]),
)
@settings(
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_reading_raises_nothing_but_trace_error(
    tmp_path: Path, parts: list[bytes], packed: bool, on_bad_line: str, name: str
) -> None:
    raw = b"".join(parts)
    with suppress(TraceError):
        trace = read(
            tmp_path, gzip.compress(raw) if packed else raw, on_bad_line=on_bad_line, format=name
        )
        times = [request.time_s for request in trace.requests]
        assert times
        assert times == sorted(times)
        assert times[0] == 0


def test_a_record_has_requests_what_the_engine_found_and_what_happened(tmp_path: Path) -> None:
    """Events are in order of their own times: they are recorded when they show."""
    header = {"kvtier_record": 1, "block_tokens": 16}
    later = {"event": "reset", "time_s": 6}
    trace = read(tmp_path, lines(header, RECORDED, later, DOWN, {**RECORDED, "time_s": 8}))
    assert trace.requests[0] == TraceRequest(0.0, 40, 0, (0, 1), ended_s=2.5, gpu_tokens=16)
    assert trace.recorded == Recorded(
        events=(TraceEvent(-1.0, "tier_down", "1:fs", "loads"), TraceEvent(1.0, "reset")),
        gpu_tokens=32,
        loaded_tokens={"0:primary": 32},
        computed_tokens=16,
    )


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({**RECORDED, "gpu_tokens": 41}, "gpu_tokens is more than tokens"),
        ({**RECORDED, "loaded_tokens": {str(n): 0 for n in range(65)}}, "more than 64 tiers"),
        ({**DOWN, "event": "reset"}, "a reset has no tier"),
        ({**DOWN, "tier": ""}, "other events have both"),
        ({**DOWN, "work": ""}, "other events have both"),
        ({**DOWN, "event": "smoke"}, "smoke"),
        ({**DOWN, "tier": "x" * 65}, "<= 64"),
    ],
)
def test_what_no_recorder_writes_is_a_bad_line(
    tmp_path: Path, row: dict[str, Any], what: str
) -> None:
    header = {"kvtier_record": 1, "block_tokens": 16}
    with pytest.raises(TraceError, match=f"line 2: .*{what}"):
        read(tmp_path, lines(header, row))
    trace = read(tmp_path, lines(header, row, RECORDED), on_bad_line="skip")
    assert (len(trace.requests), trace.bad_line_count) == (1, 1)


def test_the_examples_of_the_reference_can_be_read(tmp_path: Path) -> None:
    examples = printed("reference/trace-formats.md", "json")
    found = [read(tmp_path, example.encode()) for example in examples]
    assert [trace.format for trace in found] == ["mooncake", "qwen-bailian", "plain", "recorded"]
    assert all(len(trace.requests[0].blocks) == 3 for trace in found)
