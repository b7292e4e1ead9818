"""``kvtier report``: the facts of a file are on its page, as pictures, in words and as figures."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.recording.recorder import Happened, Record, Recorder
from kvtier.tools.cli.exit_status import BAD_INPUT, INTERRUPTED
from kvtier.tools.cli.main import main
from kvtier.tools.report import record as record_module
from kvtier.tools.report.axis import BINS_MAX, clock_axis, elapsed_axis, lasted
from kvtier.tools.report.drawing import page_of_report
from kvtier.tools.report.spread import Spread
from tests.support.patience import PATIENCE_S
from tests.unit.tools._lying import make_memory_lie
from tests.unit.tools._read_page import ReadPage
from tests.unit.tools.test_replay_cli import write_trace

if TYPE_CHECKING:
    from tests.unit.tools._shell import Shell

NOON_S = 1_764_417_600.0  #: 2025-11-29 12:00:00 UTC
BLOCK = 32
TIERS = ["0:primary", "nvme"]


def keys_of(count: int) -> list[bytes]:
    return [number.to_bytes(8, "little") * 4 + b"\0" * 4 for number in range(1, count + 1)]


def asked(after_s: float, **changes: Any) -> Record:
    """Return a request of four blocks: on the GPU, in DRAM, in the tier, and nowhere."""
    keys = keys_of(4)
    fields: dict[str, Any] = {
        "arrived_s": NOON_S + after_s,
        "started_s": NOON_S + after_s + 0.5,
        "ended_s": NOON_S + after_s + 2,
        "tokens": 4 * BLOCK,
        "output_tokens": 7,
        "gpu_tokens": BLOCK,
        "loaded": keys[1:3],
        "sources": {keys[2]: 0},
        "keys": keys,
    }
    return Record(**(fields | changes))


def recorded(path: Path, *events: Record | Happened, tiers: list[str] = TIERS) -> Path:
    """Write a record by the engine's own recorder."""
    recorder = Recorder(str(path), 1 << 24, block_tokens=BLOCK, tiers=tiers)
    for each in events:
        recorder.add(each)
    recorder.start()
    recorder.close(PATIENCE_S)
    assert not recorder.dropped
    return path


def page_of(kvtier: Shell, *arguments: object) -> ReadPage:
    return ReadPage(kvtier.shown("report", *arguments))


def numbers(cells: list[str]) -> list[float]:
    return [float(each.replace(",", "") or 0) for each in cells]


# --- a record ---


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Ten requests in 100 s; the tier does no loads for 20 s of them, and one reset."""
    return recorded(
        tmp_path / "requests.jsonl.zst",
        *(asked(10.0 * number) for number in range(5)),
        Happened(NOON_S + 40, "tier_down", 0, "loads"),
        Happened(NOON_S + 60, "tier_up", 0, "loads"),
        *(asked(10.0 * number, loaded=(), sources={}) for number in range(5, 10)),
        Happened(NOON_S + 95, "reset"),
    )


def test_a_record_says_first_what_an_operator_asks(record: Path, kvtier: Shell) -> None:
    page = page_of(kvtier, record)
    assert page.title == "kvtier record: requests.jsonl.zst"
    assert page.verdict == "warned"
    first, second, third = page.summary
    assert first == (
        "50.0 % of the prompt tokens needed no prefill: 25.0 % were loaded from kvtier's tiers "
        "(0:primary 12.5 %, nvme 12.5 %), and 25.0 % were in the GPU's prefix cache."
    )
    assert second == (
        "10 requests with 1,280 prompt tokens, from 2025-11-29 12:00:00 to 2025-11-29 12:01:35 UTC "
        "(1:35 min)."
    )
    assert third == (
        "1 fault of tiers. The longest: nvme did no loads for 20 s from 2025-11-29 12:00:40 UTC on."
    )


def test_a_records_tables_have_the_sums(record: Path, kvtier: Shell) -> None:
    tables = page_of(kvtier, record).tables
    assert tables["Prompt tokens"] == [
        ["0:primary", "160", "12.5 %"],
        ["nvme", "160", "12.5 %"],
        ["the GPU's prefix cache", "320", "25.0 %"],
        ["computed", "640", "50.0 %"],
        ["all", "1,280", "100.0 %"],
    ]
    assert tables["Faults"] == [["nvme", "loads", "2025-11-29 12:00:40", "20 s"]]
    assert tables["Requests"] == [
        ["prompt, tokens", "128", "128", "128"],
        ["answer, tokens", "7", "7", "7"],
        ["wait before it loads or runs", "500 ms", "500 ms", "500 ms"],
        ["duration", "2 s", "2 s", "2 s"],
    ]


def test_a_record_is_drawn_where_it_happened(record: Path, kvtier: Shell) -> None:
    """One axis: the fault's strip lies where the tier's tokens are missing."""
    page = page_of(kvtier, record)
    assert page.panels == [
        *("Where prompt tokens came from", "Prefill avoided", "Faults", "Requests", "Prompts"),
        *("Answers", "Wait of requests", "Duration of requests"),
    ]
    figures = page.figures
    assert figures["time (UTC)"][0] == "2025-11-29 12:00:00"
    bins = len(figures["time (UTC)"])
    bin_s = record_module.BIN_S_MIN * 2  # 95 s are more than 240 quarters of a second
    for source, tokens in (("0:primary", 160), ("nvme", 160), ("computed", 640)):
        drawn = numbers(figures[f"Where prompt tokens came from: {source}"])
        assert sum(drawn) * bin_s == tokens
    assert figures["Prefill avoided: in all"][0] == "75.0 %"
    down = [at for at, word in enumerate(figures["Faults: nvme, loads"]) if word]
    assert down == list(range(int(40 / bin_s), int(60 / bin_s) + 1))
    ((kind, _, place),) = page.graphs["nvme, loads"].shapes
    assert kind == "rect"
    assert float(place["x"]) == pytest.approx(1000 * down[0] / bins, abs=0.1)
    assert float(place["width"]) == pytest.approx(1000 * len(down) / bins, abs=0.1)
    assert "no work done: " in page.graphs["nvme, loads"].text
    assert figures["Faults: resets of the connector"].index("reset") == int(95 / bin_s)


def test_layers_of_a_stack_stand_on_each_other(record: Path, kvtier: Shell) -> None:
    graph = page_of(kvtier, record).graphs["Where prompt tokens came from"]
    heights = {}
    for kind, style, attributes in graph.shapes:
        assert kind == "polygon"
        corners = [point.split(",") for point in attributes["points"].split()]
        if all(float(x) < 50 for x, _ in corners):  # of the first request
            heights[style] = {float(y) for _, y in corners}
    assert heights == {"a": {99, 74.5}, "b": {74.5, 50}, "c": {50, 25.5}, "g": {25.5, 1}}
    assert "computed: lowest 0, " in graph.text


def test_what_a_record_does_not_have_is_no_panel(tmp_path: Path, kvtier: Shell) -> None:
    cold = [asked(number, gpu_tokens=0, loaded=(), sources={}) for number in range(3)]
    page = page_of(kvtier, recorded(tmp_path / "cold.zst", *cold))
    assert "Faults" not in page.panels
    assert page.verdict == ""
    assert page.summary[-1] == "No tier failed."
    assert [row[0] for row in page.tables["Prompt tokens"]] == ["computed", "all"]
    assert "nvme" not in page.html


def test_a_fault_that_lasts_and_requests_that_never_ran_are_named(
    tmp_path: Path, kvtier: Shell
) -> None:
    down = Happened(NOON_S + 1, "tier_down", 0, "stores")
    never = asked(10, started_s=None)
    page = page_of(kvtier, recorded(tmp_path / "r", asked(0), down, never))
    assert page.summary[2].startswith("Requests that never ran: 1.")
    assert page.summary[3].endswith("on, and still did not at the end.")
    assert page.tables["Faults"] == [["nvme", "stores", "2025-11-29 12:00:01", "11 s, to the end"]]


def test_no_name_becomes_markup_and_nothing_is_fetched(tmp_path: Path, kvtier: Shell) -> None:
    """The names of tiers, and of the file, are whatever somebody chose."""
    hostile = "</style><script src='http://x/'>&\"<svg onload=x>"
    tiers = ["0:primary", hostile]
    path = tmp_path / "<img src=x onerror=alert(1)>.zst"
    down = Happened(NOON_S, "tier_down", 0, "loads")
    page = page_of(kvtier, recorded(path, asked(0), down, asked(5), tiers=tiers))
    assert page.addresses == []
    assert [row[0] for row in page.tables["Faults"]] == [hostile]
    assert f"{hostile}, loads" in page.graphs
    assert page.title.endswith("<img src=x onerror=alert(1)>.zst")
    assert {each.tag for each in page.root.iter()} == TAGS


TAGS = {
    *("html", "head", "meta", "title", "style", "body", "main", "section", "div", "span", "p"),
    *("h1", "h2", "small", "svg", "desc", "rect", "line", "polyline", "polygon", "table"),
    *("caption", "thead", "tbody", "tr", "th", "td", "details", "summary", "footer"),
}


def test_a_long_record_is_never_in_memory(tmp_path: Path) -> None:
    """Its bins become wider, as often as there are too many."""
    count = 20_000
    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        file.write(f'{{"kvtier_record":1,"block_tokens":{BLOCK}}}\n')
        for number in range(count):
            file.write(json.dumps(line_of(number)) + "\n")
    tracemalloc.start()
    page = drawn(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size  # as objects, its lines would take several times as much
    assert BINS_MAX / 2 <= len(page.figures["time (UTC)"]) <= BINS_MAX
    assert page.tables["Prompt tokens"][-1][1] == f"{100 * count:,}"


def line_of(number: int) -> dict[str, Any]:
    at_s = NOON_S + 10.0 * number
    return {
        "time_s": at_s,
        "started_s": at_s + 0.1,
        "ended_s": at_s + 1 + number % 50,
        "tokens": 100,
        "output_tokens": 5,
        "gpu_tokens": 0,
        "loaded_tokens": {"0:primary": 64},
        "computed_tokens": 36,
        "blocks": [1, 2, 3],
    }


def drawn(path: Path) -> ReadPage:
    output = path.with_suffix(".html")
    assert main(["report", str(path), "--output", str(output)]) == 0
    return ReadPage(output.read_text())


# --- replays ---


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl")


@pytest.mark.slow
def test_a_replays_page_has_the_figures_of_its_report(
    trace: Path, tmp_path: Path, kvtier: Shell
) -> None:
    report = tmp_path / "report.json"
    options = ("--block-bytes", "4KiB", "--dram", "50%", "--tier", "memory:1MiB")
    kvtier.shown("replay", trace, *options, "--json", report)
    found = json.loads(report.read_text())
    page = page_of(kvtier, report)
    assert page.verdict == "passed"
    assert page.addresses == []
    hits = found["requests"]["hit_blocks"]
    assert page.tables["Where the prompts' blocks came from"][-2][1] == f"{hits}"
    share = sum(tier["hit_tokens"] for tier in found["tiers"]) / found["requests"]["input_tokens"]
    assert page.summary[0].startswith(f"{100 * share:.1f} % of the prompt tokens were loaded")
    figures, over_time = page.figures, found["over_time"]
    resident = [one for one in figures["Residency: 1:memory"] if one]
    assert resident[-1] == f"{over_time[-1]['resident_blocks'][1]:,}"
    requests = sum(numbers(figures["Requests"])) * found["interval_s"]
    assert requests == pytest.approx(12, rel=0.01)
    names = [f"Where prompts' blocks came from: {tier['name']}" for tier in found["tiers"]]
    first = next(at for at, each in enumerate(figures[names[0]]) if each)
    shares = [figures[each][first] for each in (*names, names[0].split(": ")[0] + ": computed")]
    assert shares == ["0.0 %", "0.0 %", "100.0 %"]


@pytest.mark.slow
def test_a_replay_that_failed_says_so_first(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvtier: Shell
) -> None:
    make_memory_lie(monkeypatch, -1)
    report = tmp_path / "report.json"
    options = ("--block-bytes", "4KiB", "--dram", "16KiB", "--tier", "memory:1MiB")
    kvtier.shown("replay", trace, *options, "--json", report, status=1)
    page = page_of(kvtier, report)
    assert page.verdict == "failed"
    assert page.summary[0] == "FAILED"
    assert "blocks held wrong bytes when they were read" in page.html


def test_policies_are_drawn_over_capacities(trace: Path, tmp_path: Path, kvtier: Shell) -> None:
    report = tmp_path / "report.json"
    options = ("--policies", "lru,arc", "--capacities", "2,4,8")
    kvtier.shown("replay", trace, *options, "--json", report)
    found = json.loads(report.read_text())
    page = page_of(kvtier, report)
    figures = page.figures
    assert [each.split()[0] for each in figures["capacity"]] == ["2", "4", "8"]
    for policy, points in found["policies"].items():
        ratios = [f"{100 * point['hit_ratio']:.1f} %" for point in points]
        assert figures[f"Hit ratio: {policy}"] == ratios
    lines = [shape for shape in page.graphs["Hit ratio"].shapes if shape[0] == "polyline"]
    places = [point.split(",")[0] for point in lines[0][2]["points"].split()]
    assert places == ["0.0", "500.0", "1000.0"], "each is twice the one before it"


# --- the command ---


def test_the_page_goes_to_a_file_whole_or_not_at_all(
    record: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvtier: Shell
) -> None:
    output = tmp_path / "page.html"
    assert kvtier.shown("report", record, "--output", output) == f"Page: {output}\n"
    page = output.read_text()
    assert page == kvtier.shown("report", record)
    before = sorted(tmp_path.iterdir())

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(record_module.Record, "add", interrupted)
    kvtier.shown("report", record, "--output", output, status=INTERRUPTED)
    assert (output.read_text(), sorted(tmp_path.iterdir())) == (page, before)


def test_a_name_that_is_not_utf_8_does_not_matter(record: Path, kvtier: Shell) -> None:
    other = record.rename(record.with_name("\udcff.zst"))
    assert page_of(kvtier, other).title == "kvtier record: ?.zst"


def test_a_full_disk_behind_stdout_is_said(record: Path) -> None:
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "kvtier", "report", str(record)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (run.returncode, run.stderr) == (
        BAD_INPUT,
        "kvtier report: stdout cannot be written: No space left on device.\n",
    )


def test_no_page_goes_to_a_terminal(
    record: Path, monkeypatch: pytest.MonkeyPatch, kvtier: Shell
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "give --output FILE" in kvtier.refused("report", record)


def test_a_record_that_is_cut_is_refused_or_drawn_as_far_as_it_goes(
    record: Path, tmp_path: Path, kvtier: Shell
) -> None:
    """As ``kvtier replay`` does."""
    cut = tmp_path / "cut.zst"
    whole = record.read_bytes()
    cut.write_bytes(whole + whole[: len(whole) // 2])
    said = kvtier.refused("report", cut)
    assert said == kvtier.refused("replay", cut).replace("replay: ", "report: ", 1)
    assert "truncated" in said
    page = page_of(kvtier, cut, "--on-bad-line", "skip")
    assert page.verdict == "warned"
    assert page.summary[1].startswith("10 requests")
    assert page.summary[-1].startswith("Bad lines that are left out: 1 (line ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not one JSON text"),
        ("<html>", "is not one JSON text"),
        ("[" * 100_000, "is not one JSON text"),
        ("[1]", "is not a JSON object"),
        ('{"report": "kvtier size"}', "there is no page of such a file"),
        ('{"report": ["kvtier soak"]}', "there is no page of such a file"),
        ('{"report": "kvtier soak", "layer": 5}', "is no whole report of kvtier soak"),
        ('{"format": "kvtier-replay", "partial": 1}', "is no whole report of kvtier-replay"),
        (
            '{"timestamp": 1, "hash_ids": [1]}\n{"timestamp": 2, "hash_ids": [1]}',
            "has no results",
        ),
        ('{"time_s": 1, "tokens": 16, "blocks": [1]}', "has no results"),
        ('{"kvtier_record":1,"block_tokens":32}\n', "holds no request"),
        ('{"kvtier_record":2,"block_tokens":32}\n', "line 1: "),
    ],
)
def test_other_files_are_refused_with_what_can_be_drawn(
    text: str, said: str, tmp_path: Path, kvtier: Shell
) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert said in kvtier.refused("report", path)


def test_a_place_without_a_file_is_refused(tmp_path: Path, kvtier: Shell) -> None:
    assert "cannot be read" in kvtier.refused("report", tmp_path)
    assert "cannot be read: No such file" in kvtier.refused("report", tmp_path / "nothing")
    there_is_none = tmp_path / "nowhere" / "page.html"
    assert "there is no folder" in kvtier.refused("report", tmp_path, "--output", there_is_none)


# --- soaks ---


def soak_of(**changes: Any) -> dict[str, Any]:
    """Return the JSON of a soak of 20 s with one fault. A real one: tests/unit/stress."""
    samples = [
        {
            "at_s": float(at),
            "requests": at,
            "blocks_read": 60 * at,
            "blocks_stored": 40 * at,
            "lookups": 10 * at,
            "hits": 5 * at,
            "resident": {"1:fs": at},
            "quarantined": 0,
            "breakers": {"1:fs": "OPEN" if 8 <= at < 10 else "CLOSED"},
        }
        for at in range(20)
    ]
    return {
        "report": "kvtier soak",
        "layer": "runtime",
        "seed": 7,
        "seconds": 20.0,
        "planned_s": 0.0,
        "samples": samples,
        "injected": {"hang": 3},
        "noticed": {},
        "spells": [{"from_s": 8.0, "to_s": 9.5, "kind": "hang", "target": "fs"}],
        "figures": {},
        "checks": {"slots": "all free"},
        "faults_ended_s": 10.0,
        "failure": None,
        "injected_total": 3,
        "injected_a_minute": 18.0,
        **changes,
    }


def test_a_soak_shows_load_breakers_and_faults_on_one_axis() -> None:
    page = ReadPage(page_of_report(soak_of(), "report.json").html())
    assert page.panels == ["Throughput", "Hit ratio", "Residency", "Circuit breakers", "Faults"]
    assert page.summary[0] == "PASSED: 3 faults injected, 18 a minute, in 20 s."
    assert "hang of fs for 1.5 s, 8 s after the beginning" in page.summary[2]
    figures = page.figures
    assert set(figures["Throughput"][1:]) == {"100"}
    assert [at for at, word in enumerate(figures["Circuit breakers: 1:fs"]) if word == "open"] == [
        4
    ]
    assert [at for at, word in enumerate(figures["Faults: hang"]) if word] == [4]
    shade = page.graphs["hang"].shapes[0]
    assert (shade[1], shade[2]["x"]) == ("rest", "500.0")


def test_a_soak_that_failed_says_why() -> None:
    page = ReadPage(page_of_report(soak_of(failure="raised:\n<b>"), "report.json").html())
    assert page.verdict == "failed"
    assert page.summary[0].startswith("FAILED: ")
    assert [each.text for each in page.root.iter("pre")] == ["raised:\n<b>"]


# --- parts ---


@pytest.mark.parametrize("ends_s", [1e-9, 0.3, 7.0, 600.0, 90_000.0, 1e9, 1e300])
def test_an_axis_has_few_ticks_and_all_are_on_it(ends_s: float) -> None:
    axis = elapsed_axis(ends_s, 7)
    assert 1 <= len(axis.ticks) <= 9
    assert all(0 <= at <= 1 for at, _ in axis.ticks)


def test_a_clocks_ticks_are_at_whole_moments() -> None:
    axis = clock_axis(NOON_S + 50, 60.0, 60)
    assert [label for _, label in axis.ticks] == [
        f"12:{each}" for each in ("10", "20", "30", "40", "50")
    ] + ["13:00"]
    assert axis.ticks[0][0] == pytest.approx(550 / 3600)
    midnight = clock_axis(NOON_S, 3600.0, 24)
    assert "30 Nov" in [label for _, label in midnight.ticks]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0"), (0.0012, "1.2 ms"), (59, "59 s"), (60, "1 min"), (3599, "59:59 min")),
        *((5400, "1:30 h"), (86_400, "1 d"), (100_000, "1 d 3 h")),
    ],
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert lasted(seconds).replace("\N{NO-BREAK SPACE}", " ") == text


def test_a_spread_has_percentiles_within_its_steps() -> None:
    choose = random.Random(3)
    values = sorted(choose.lognormvariate(0, 3) for _ in range(1000))
    spread, other = Spread(), Spread()
    for number, each in enumerate(values):
        (spread if number % 2 else other).add(each)
    spread.merge(other)
    for percent in (1, 50, 90, 99, 100):
        assert spread.percentile(percent) == pytest.approx(values[percent * 10 - 1], rel=0.022)
    assert Spread().percentile(50) is None
    other.add(-1.0)
    assert other.percentile(0.1) == 0.0
