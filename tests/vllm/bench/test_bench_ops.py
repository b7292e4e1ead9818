"""``stress.bench ops``: what it compares and how it reports. Never how fast anything is."""

from __future__ import annotations

import json
import signal
import tempfile
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.errors import InternalError
from stress.bench.__main__ import main
from tests.support.threads_left import ending_threads
from tests.vllm.bench.bench_process import assert_ctrl_c_leaves_nothing, start_bench

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # as in conftest.py
    from vllm.v1.kv_offload.base import LookupResult

    from kvtier.tools.bench.percentile import percentile
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


def test_ctrl_c_does_not_strike_within_a_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it could keep a lock of vLLM's tier taken for ever."""
    filled: list[str] = []
    fill = RequestPlayer.fill

    def interrupted(player: RequestPlayer, first: int, count: int) -> None:
        signal.raise_signal(signal.SIGINT)
        fill(player, first, count)
        filled.append(player.side.name)

    monkeypatch.setattr(RequestPlayer, "fill", interrupted)
    options = OpsOptions(blocks=16, request_blocks=8, runs=1, samples=1)
    with pytest.raises(KeyboardInterrupt):
        measure_policy(options, "lru", lambda: None)
    assert len(filled) == 1


def test_the_ratio_is_that_of_both_sides_medians() -> None:
    runs = [
        watches([1.0, 2.0, 90.0], [10.0, 10.0, 10.0], Call.LOOKUP_HIT),
        watches([3.0, 3.0, 3.0], [5.0, 5.0, 50.0], Call.LOOKUP_HIT),
        watches([4.0, 4.0, 4.0], [8.0, 8.0, 8.0], Call.LOOKUP_HIT),
    ]
    found = figures(Call.LOOKUP_HIT, runs)
    assert found[KVTIER] == {"median_ns": 3.0, "p99_ns": 90.0}
    assert found[VLLM] == {"median_ns": 8.0, "p99_ns": 50.0}
    assert found["ratio"] == 3.0 / 8.0
    assert (found["ratio_min"], found["ratio_max"]) == (2.0 / 10.0, 3.0 / 5.0)
    assert found["bound"] == 1 / 3
    assert found["holds"] is False


def test_a_bound_holds_up_to_itself_and_a_call_without_one_is_only_told() -> None:
    assert (
        figures(Call.COMPLETE_STORE, [watches([1.0], [2.0], Call.COMPLETE_STORE)])["holds"] is True
    )
    found = figures(Call.GET_STATS, [watches([9.0], [1.0], Call.GET_STATS)])
    assert found["holds"] is None
    assert found["unit"] == "ns/call"


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0
    assert percentile([float(number) for number in range(1, 201)], 99) == 198.0


def test_a_stopwatch_counts_by_the_key() -> None:
    watch = Stopwatch()
    assert watch.each("each", lambda key, _: key[::-1], [b"ab", b"cd"], None) == [b"ba", b"dc"]
    assert watch.call("call", len, [1, 2, 3], keys=3) == 3
    watch.end_turn("whole", 1)
    assert watch.ns["whole"][0] == pytest.approx(2 * watch.ns["each"][0] + 3 * watch.ns["call"][0])


def test_a_pause_is_that_of_the_longest_single_call() -> None:
    watch = PauseWatch()
    sizes = [1, 2_000_000, 1]
    watch.each("sum", lambda size, _: sum(range(size)), sizes, None)  # type: ignore[arg-type]
    watch.call("short", sum, range(1))
    assert watch.cpu_ns["sum"] > watch.cpu_ns["short"]
    assert watch.wall_ns["sum"] > 0


def test_each_request_has_key_objects_of_its_own(side: ManagerSide) -> None:
    """vLLM makes keys anew for each request, so a hit must not profit from a key it knows."""
    stored, looked_up = spy(side, "prepare_store"), spy(side, "lookup")
    player = RequestPlayer(side, Stopwatch())
    player.store(0, 8)
    player.load(0, 8)
    keys = stored[0][0]
    again = [key for key, _context in looked_up[-8:]]
    assert again == keys
    assert not any(ours is theirs for ours, theirs in zip(again, keys, strict=True))


def test_completions_come_as_sets_and_positions_are_known(side: ManagerSide) -> None:
    """That is how vLLM's connector calls."""
    completed, loaded = spy(side, "complete_store"), spy(side, "complete_load")
    player = RequestPlayer(side, Stopwatch())
    player.store(0, 8)
    player.load(0, 8)
    assert type(completed[0][0]) is type(loaded[0][0]) is set
    keys, context = completed[0]
    assert sorted(map(context.get_offload_key_position, keys)) == [16 * n for n in range(1, 9)]


def test_lookups_of_another_kind_than_the_row_says_are_no_figures(side: ManagerSide) -> None:
    with pytest.raises(InternalError, match="MISS instead of HIT"):
        RequestPlayer(side, Stopwatch()).load(0, 8)


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


def test_storing_into_a_full_tier_evicts(side: ManagerSide) -> None:
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
    advanced: list[int] = []
    options = OpsOptions(blocks=70, request_blocks=8, runs=1, with_tier=with_tier)
    found = measure_policy(options, "arc", lambda: advanced.append(1))
    assert len(advanced) == 1 + options.runs
    assert (found["policy"], found["vllm_policy"], found["blocks"]) == ("arc", "arc", 64)
    assert list(found["calls"]) == list(Call)
    assert {Call.LOOKUP_FILLING, Call.LOOKUP_ASKED, Call.LOOKUP_PROBING} <= found["calls"].keys()
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
    files = ["--json", str(report), "--picture", str(picture)]
    with start_bench(tmp_path, "ops", *options, *files) as bench:
        assert bench.wait() == 0, bench.log()
        shown = bench.log()
        bench.assert_nothing_is_left()
    data = json.loads(report.read_text())
    assert {"kvtier_version", "vllm_version", "python", "machine"} <= data.keys()
    assert [entry["policy"] for entry in data["policies"]] == ["lru"]
    assert [point["blocks"] for point in data["scale"]] == [64, 256]
    (memory,) = data["memory"]
    for name in SIDES:
        assert memory[name]["blocks"] == 256
        # A key alone is 36 bytes, and both keep it.
        assert memory[name]["traced_bytes_per_block"] > 36
        assert memory[name]["gc_longest_ms"] >= 0
        assert set(memory[name]["call_longest_us"]) <= set(Call)
    assert memory["bytes_hold"] is (memory[KVTIER]["traced_bytes_per_block"] <= 400)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert all(name in shown for name in ("lookup, hit", "bytes a block", "longest garbage"))


@pytest.mark.one_release
@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    options = ["ops", "--blocks", "64", "--runs", "1"]
    assert_ctrl_c_leaves_nothing(tmp_path, *options, child="children stress.bench.ops")


@pytest.mark.one_release
def test_an_unknown_policy_is_refused_before_the_first_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ops", "--policies", "lru,nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().err


@pytest.mark.one_release
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["ops", "--runs", "0"], "--runs 0"),
        (["ops", "--blocks", "-1"], "--blocks -1"),
        (["ops", "--request-blocks", "0"], "--request-blocks 0"),
        (["ops", "--picture", "scale.png"], "--scale"),
        (["ops", "--json", "no/such/folder/report.json"], "no/such/folder"),
        (["engine", "--prompts", "0"], "--prompts 0"),
        (["engine", "--json", "."], "folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_options_are_refused_before_the_work(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    assert named in capsys.readouterr().err
