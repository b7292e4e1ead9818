"""``stress.bench ops``: that both sides do the same work. Never how fast anything is."""

from __future__ import annotations

import json
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import InternalError
from stress.bench.__main__ import main
from tests.support.threads_left import ending_threads
from tests.vllm.bench.bench_process import printed_bench, run_bench

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # as in conftest.py
    from vllm.v1.kv_offload.base import LookupResult

    from stress.bench.ops import BLOCK_BYTES, OpsOptions, figures, measure_policy
    from stress.bench.sides import KVTIER, SIDES, VLLM, ManagerSide, Setup, make_keys
    from stress.bench.turns import Call, PauseWatch, RequestPlayer, Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(params=SIDES)
def side(request: pytest.FixtureRequest) -> Iterator[ManagerSide]:
    """Either side, with room for two requests of eight blocks."""
    built = ManagerSide(request.param, Setup(slot_count=16, block_bytes=64, policy="lru"))
    yield built
    built.close()


def spy(side: ManagerSide, name: str) -> list[tuple[Any, ...]]:
    """Note the arguments of all calls of one of the manager's methods."""
    calls: list[tuple[Any, ...]] = []
    method: Callable[..., Any] = getattr(side.manager, name)

    def noted(*arguments: Any) -> Any:
        calls.append(arguments)
        return method(*arguments)

    setattr(side.manager, name, noted)
    return calls


def watches(kvtier_ns: list[float], vllm_ns: list[float], call: str) -> dict[str, Stopwatch]:
    found = {KVTIER: Stopwatch(), VLLM: Stopwatch()}
    found[KVTIER].ns[call] = kvtier_ns
    found[VLLM].ns[call] = vllm_ns
    return found


def test_the_ratio_is_that_of_both_sides_medians() -> None:
    runs = [
        watches([1.0, 2.0, 90.0], [10.0, 10.0, 10.0], Call.LOOKUP_HIT),
        watches([3.0, 3.0, 3.0], [5.0, 5.0, 50.0], Call.LOOKUP_HIT),
        watches([4.0, 4.0, 4.0], [8.0, 8.0, 8.0], Call.LOOKUP_HIT),
    ]
    found = figures(Call.LOOKUP_HIT, runs)
    assert found[KVTIER] == {"median_ns": 3.0, "p99_ns": 90.0}
    assert found[VLLM] == {"median_ns": 8.0, "p99_ns": 50.0}
    assert (found["ratio"], found["of_runs"]) == (3.0 / 8.0, [2.0 / 10.0, 3.0 / 5.0, 4.0 / 8.0])
    assert found["holds"] is False
    told = figures(Call.GET_STATS, [watches([9.0], [1.0], Call.GET_STATS)])
    assert told["holds"] is None


def test_a_stopwatch_counts_by_the_key_and_a_pause_is_the_longest_call() -> None:
    watch = Stopwatch()
    assert watch.each("each", lambda key, _: key[::-1], [b"ab", b"cd"], None) == [b"ba", b"dc"]
    assert watch.call("call", len, [1, 2, 3], keys=3) == 3
    watch.end_turn("whole", 1)
    assert watch.ns["whole"][0] == pytest.approx(2 * watch.ns["each"][0] + 3 * watch.ns["call"][0])
    pauses = PauseWatch()
    sizes = [1, 2_000_000, 1]
    pauses.each("sum", lambda size, _: sum(range(size)), sizes, None)  # type: ignore[arg-type]
    pauses.call("short", sum, range(1))
    assert pauses.longest_ns["sum"] > pauses.longest_ns["short"]


def test_calls_are_those_of_vllms_connector(side: ManagerSide) -> None:
    """It makes keys anew for each request: a hit must not profit from a key it knows."""
    stored, looked_up = spy(side, "prepare_store"), spy(side, "lookup")
    completed, loaded = spy(side, "complete_store"), spy(side, "complete_load")
    player = RequestPlayer(side, Stopwatch())
    player.store(0, 8)
    player.load(0, 8)
    again = [key for key, _context in looked_up[-8:]]
    assert again == stored[0][0]
    assert not any(ours is theirs for ours, theirs in zip(again, stored[0][0], strict=True))
    assert type(completed[0][0]) is type(loaded[0][0]) is set
    keys, context = completed[0]
    assert sorted(map(context.get_offload_key_position, keys)) == [16 * n for n in range(1, 9)]


@pytest.mark.parametrize("last", [0, 7], ids=["first-key", "last-key"])
@pytest.mark.parametrize("name", SIDES)
def test_it_waits_until_the_tier_has_answered_for_each_key(
    name: str, last: int, tmp_path: Path
) -> None:
    """A busy machine asks for them in several probes, which may be answered in any order."""
    side = ManagerSide(name, Setup(16, BLOCK_BYTES, "lru", tmp_path))
    key, lookup = make_keys(0, 8)[last], side.manager.lookup
    late = [LookupResult.RETRY] * 12
    side.manager.lookup = lambda asked, context: (
        late.pop() if late and asked == key else lookup(asked, context)
    )
    try:
        RequestPlayer(side, Stopwatch()).ask(0, 8)
    finally:
        side.close()
    assert not late


def test_storing_into_a_full_tier_evicts_and_a_miss_is_no_figure_of_a_hit(
    side: ManagerSide,
) -> None:
    watch = Stopwatch()
    player = RequestPlayer(side, watch)
    player.fill(0, 8)
    player.store(8, 8)
    player.store(16, 8, evicting=True)
    assert len(watch.ns[Call.PREPARE_STORE_EVICTING]) == 1
    player.load(16, 8)
    with pytest.raises(InternalError, match="MISS instead of HIT"):
        player.load(0, 8)


@pytest.mark.parametrize("with_tier", [False, True])
def test_every_call_is_measured_on_both_sides_and_nothing_is_left(
    with_tier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    threads = ending_threads()
    options = OpsOptions(blocks=70, request_blocks=8, runs=1, with_tier=with_tier)
    found = measure_policy(options, "lru", lambda: None)
    assert (found["policy"], found["blocks"]) == ("lru", 64)
    assert list(found["calls"]) == list(Call)
    for call in found["calls"].values():
        assert all(0 < call[name]["median_ns"] <= call[name]["p99_ns"] for name in SIDES)
        assert call["ratio"] == call[KVTIER]["median_ns"] / call[VLLM]["median_ns"]
    assert list(tmp_path.iterdir()) == []
    assert ending_threads() <= threads, "one that was begun here still runs"


@pytest.mark.one_release
@pytest.mark.slow
def test_the_command_reports_calls_scale_and_memory(tmp_path: Path) -> None:
    report, picture = tmp_path / "report.json", tmp_path / "scale.png"
    options = ["--blocks", "64", "--request-blocks", "16", "--runs", "1", "--scale", "64,256"]
    printed = printed_bench("explanation/scheduler-cost.md", "ops")
    options += ["--picture", str(picture), "--json", str(report)]
    shown = run_bench(tmp_path, *printed, *options)
    data = json.loads(report.read_text())
    policies = 2
    assert [point["blocks"] for point in data["scale"]] == [64] * policies + [256] * policies
    assert len(data["memory"]) == policies
    for memory in data["memory"]:
        for name in SIDES:
            assert memory[name]["blocks"] == 256
            # A key alone is 36 bytes, and both keep it.
            assert memory[name]["traced_bytes_per_block"] > 36
            assert set(memory[name]["call_longest_ms"]) <= set(Call)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert all(name in shown for name in ("lookup, hit", "bytes a block", "longest garbage"))


@pytest.mark.one_release
def test_an_unknown_policy_is_refused_before_the_first_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ops", "--policies", "lru,nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().err
