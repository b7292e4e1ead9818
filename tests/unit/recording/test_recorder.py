"""What a recorder promises: whole frames that the trace reader reads, bounded, never in the way."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import zstandard

from kvtier.errors import ConfigError
from kvtier.recording import recorder as recorder_module
from kvtier.recording.recorder import Happened, Record, Recorder
from kvtier.tools.replay.traces import TraceError, read_trace
from tests.support.patience import PATIENCE_S, until

MIB = 1 << 20


def keys_of(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(8, "little") * 4 + b"\0" * 4 for number in range(first, first + count)]


def record(first: int = 1, blocks: int = 3, **changes: Any) -> Record:
    keys = keys_of(first, blocks)
    fields: dict[str, Any] = {
        "arrived_s": 1000.0,
        "started_s": 1000.5,
        "ended_s": 1002.0,
        "tokens": 32 * blocks + 5,
        "output_tokens": 7,
        "gpu_tokens": 0,
        "loaded": (),
        "sources": {},
        "keys": keys,
    }
    return Record(**(fields | changes))


def made(path: Path, bytes_max: int = MIB) -> Recorder:
    return Recorder(str(path), bytes_max, block_tokens=32, tiers=["0:primary", "nvme"])


def written(path: Path, *records: Record | Happened, bytes_max: int = MIB) -> Recorder:
    recorder = made(path, bytes_max)
    for each in records:
        recorder.add(each, len(list(each.keys)) if isinstance(each, Record) else 0)
    recorder.start()
    recorder.close(PATIENCE_S)
    return recorder


def lines_of(path: Path) -> list[dict[str, Any]]:
    reader = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True)
    return [json.loads(line) for line in reader.read().splitlines()]


def test_a_record_has_where_each_token_came_from_and_neither_tokens_nor_names(
    tmp_path: Path,
) -> None:
    path = tmp_path / "r.zst"
    keys = keys_of(1, 5)
    written(
        path,
        record(blocks=5, gpu_tokens=32, loaded=keys[1:4], sources={keys[3]: 0}, keys=keys),
    )
    assert path.stat().st_mode & 0o777 == 0o600
    assert lines_of(path) == [
        {"kvtier_record": 1, "block_tokens": 32},
        {
            "time_s": 1000.0,
            "started_s": 1000.5,
            "ended_s": 1002.0,
            "tokens": 165,
            "output_tokens": 7,
            "gpu_tokens": 32,
            "loaded_tokens": {"0:primary": 64, "nvme": 32},
            "computed_tokens": 37,
            "blocks": [1, 2, 3, 4, 5],
        },
    ]


def test_a_record_is_a_trace_with_the_engines_block_size(tmp_path: Path) -> None:
    """The blocks of outputs, which vLLM names too, are no part of a prompt."""
    path = tmp_path / "r.zst"
    written(path, record(1, 3), record(1, 2, arrived_s=1003.0, keys=keys_of(1, 9)))
    written(path, record(7, 1, arrived_s=1001.0))  # a later engine goes on with the file
    trace = read_trace(path)
    assert (trace.format, trace.block_tokens, trace.out_of_order_count) == ("recorded", 32, 1)
    assert [request.blocks for request in trace.requests] == [(0, 1, 2), (3,), (0, 1)]
    assert [request.time_s for request in trace.requests] == [0.0, 1.0, 3.0]


def test_a_record_is_bounded_by_two_files(tmp_path: Path) -> None:
    """Each can be read, and the newest requests are in the file at the path."""
    path = tmp_path / "r.zst"
    records = []
    for number in range(400):
        hashes = hashlib.shake_128(number.to_bytes(2, "little")).digest(8 * 500)
        keys = [hashes[at : at + 8] for at in range(0, len(hashes), 8)]
        records.append(record(blocks=500, keys=keys, arrived_s=1000.0 + number))
    written(path, *records)
    old = Path(f"{path}.1")
    assert {each.name for each in tmp_path.iterdir()} == {path.name, old.name}
    assert path.stat().st_size + old.stat().st_size <= MIB
    assert lines_of(path)[-1]["time_s"] == 1399.0
    assert lines_of(old)[-1]["time_s"] < lines_of(path)[1]["time_s"]


def test_what_a_full_medium_does_not_take_is_dropped_counted_and_cut_off_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.zst"
    written(path, record())
    before = path.read_bytes()
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) > 40:
            return real(descriptor, data[:40])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(recorder_module.os, "write", full)
        assert written(path, record(), record()).dropped == 2
    assert path.read_bytes() == before
    assert written(path, record()).dropped == 0
    assert len(read_trace(path).requests) == 2


def test_a_request_that_cannot_be_written_is_dropped_and_those_behind_it_are_recorded(
    tmp_path: Path,
) -> None:
    """It ended the thread, and with it the record."""
    path = tmp_path / "r.zst"
    odd = record(loaded=keys_of(1, 1), sources={keys_of(1, 1)[0]: 7})  # there is no such tier
    assert written(path, record(), odd, record(tokens=None), record()).dropped == 2
    assert len(read_trace(path).requests) == 2


def test_a_queue_that_nobody_empties_is_bounded_in_requests_and_in_keys(tmp_path: Path) -> None:
    recorder = made(tmp_path / "r.zst")
    for _ in range(recorder_module.REQUESTS_QUEUED_MAX + 3):
        recorder.add(record(), 3)
    assert recorder.dropped == 3
    large = made(tmp_path / "l.zst")
    for _ in range(3):
        large.add(record(), recorder_module.KEYS_QUEUED_MAX)
    assert large.dropped == 1


def test_a_part_of_a_block_that_the_gpu_had_is_not_counted_as_loaded(tmp_path: Path) -> None:
    """With several GPU blocks to one of kvtier's: the whole block is loaded all the same."""
    keys = keys_of(1, 3)
    written(tmp_path / "r.zst", record(gpu_tokens=40, loaded=keys[1:], sources={keys[2]: 0}))
    row = lines_of(tmp_path / "r.zst")[1]
    assert row["loaded_tokens"] == {"0:primary": 24, "nvme": 32}
    assert row["gpu_tokens"] + 24 + 32 + row["computed_tokens"] == row["tokens"]


def test_what_happened_to_the_engine_stands_between_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "r.zst"
    events = Happened(1001.0, "tier_down", 0, "loads"), Happened(999.0, "reset")
    written(path, record(), *events, record(arrived_s=1002.0))
    assert lines_of(path)[2:4] == [
        {"event": "tier_down", "time_s": 1001.0, "tier": "nvme", "work": "loads"},
        {"event": "reset", "time_s": 999.0},
    ]
    recorded = read_trace(path).recorded
    assert recorded is not None
    assert recorded.events == ((-1.0, "reset", "", ""), (1.0, "tier_down", "nvme", "loads"))
    assert recorded.computed_tokens == 2 * (32 * 3 + 5)


def test_a_file_that_another_engine_writes_is_refused_until_that_has_ended(tmp_path: Path) -> None:
    """Both would move it away, and cut off what the other wrote. Also after it was moved."""
    path = tmp_path / "r.zst"
    refused = pytest.raises(ConfigError, match=r"by another engine.*\{dp_rank\} into its name")
    first = made(path)
    with refused:
        made(path)
    path.rename(tmp_path / "moved")
    first.add(record())
    first.start()
    until(lambda: path.exists() and path.stat().st_size)  # it is locked before it is written to
    with refused:
        made(path)
    first.close(PATIENCE_S)
    assert written(path, record()).dropped == first.dropped == 0
    assert len(read_trace(path).requests) == 2


@pytest.mark.parametrize("place", ["nowhere/r.zst", "folder"])
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=r"record=.* cannot be written"):
        made(tmp_path / place)


def test_a_file_of_another_user_is_refused_and_not_kept_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is opened for each write, and each would leave a descriptor behind."""
    closed = Mock(wraps=os.close)
    monkeypatch.setattr(os, "fchmod", Mock(side_effect=PermissionError(1, "not permitted")))
    monkeypatch.setattr(os, "close", closed)
    with pytest.raises(ConfigError, match="not permitted"):
        made(tmp_path / "record.zst")
    closed.assert_called_once()


def test_a_record_that_is_cut_off_or_damaged_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "r.zst"
    written(path, record())
    whole = path.read_bytes()
    written(path, record())
    raw = path.read_bytes()
    for broken, said in (
        (raw[:-6], "truncated"),
        (raw[: len(whole) + 20] + b"\xff" * (len(raw) - len(whole) - 20), "damaged"),
        (whole + b"nonsense", "damaged"),
    ):
        path.write_bytes(broken)
        with pytest.raises(TraceError, match=said):
            read_trace(path)
        trace = read_trace(path, on_bad_line="skip")
        assert (len(trace.requests), trace.bad_line_count) == (1, 1)


def test_two_block_sizes_in_one_record_are_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_bytes(
        b'{"kvtier_record":1,"block_tokens":32}\n{"time_s":0,"ended_s":1,"tokens":40,"blocks":[1],'
        b'"gpu_tokens":0,"loaded_tokens":{},"computed_tokens":40}\n'
        b'{"kvtier_record":1,"block_tokens":16}\n'
    )
    with pytest.raises(TraceError, match="line 3: the record's blocks have 16 tokens"):
        read_trace(path)
    path.write_bytes(b'{"kvtier_record":2,"block_tokens":32}\n')
    with pytest.raises(TraceError, match=r"line 1: .*kvtier_record"):
        read_trace(path)
