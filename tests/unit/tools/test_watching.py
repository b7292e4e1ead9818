"""``kvtier status`` and ``kvtier top``: what engines show of themselves, over real HTTP."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import socket
import struct
import sys
import termios
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_args

import pytest

from kvtier.core.metrics import TierFault
from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.watching import page as pages
from kvtier.tools.watching.page import Histogram, page_url
from kvtier.tools.watching.readings import FAULTS, EngineReading, TierReading
from kvtier.tools.watching.shown import number, size, span
from kvtier.tools.watching.window import Window
from tests.unit.tools._pages import EnginePage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.tools._shell import Shell

status = import_module("kvtier.tools.cli.status")


@pytest.fixture
def page() -> EnginePage:
    return EnginePage("0")


@pytest.fixture
def address(page: EnginePage) -> Iterator[str]:
    with page.served() as place:
        yield place


def test_an_engine_whose_tiers_are_in_use_is_well(
    kvtier: Shell, page: EnginePage, address: str
) -> None:
    page.count("kvtier:loaded_tokens", 19_840, tier="nvme")
    page.count("kvtier:prefill_saved_seconds", 130)
    page.set("kvtier:tier_used_bytes", 76e6, tier="nvme")
    page.set("kvtier:tier_capacity_bytes", 100e6, tier="nvme")
    for seconds in (0.004, 0.004, 0.004, 0.3):
        page.observe("kvtier:tier_load_seconds", seconds, tier="nvme")
        page.observe("kvtier:tier_load_bytes", 1 << 20, tier="nvme")
    (engine,) = kvtier("status", address)["engines"]
    _, nvme, redis = engine["tiers"]
    assert engine["prefill_saved_s"] == 130
    assert (nvme["loaded_tokens"], nvme["read_bytes"]) == (19_840, 4 << 20)
    assert 0.002 <= nvme["load_p50_s"] <= 0.005
    assert 0.2 <= nvme["load_p99_s"] <= 0.5
    assert redis["used_bytes"] is redis["load_p50_s"] is None
    shown = kvtier.shown("status", address)
    assert "2.2 min of prefill saved" in shown
    assert re.search(r"nvme +in use +76% +19.8k +4.2 MB +- ", shown)
    assert "nothing is wrong" in shown


@pytest.mark.parametrize(
    ("states", "connection", "shown"),
    [
        ((0, 1, 0), 0, "no loads"),
        ((0, 1, 1), 0, "no loads+stores"),
        ((2, 0, 0), 0, "trying probes"),
        ((0, 1, 2), 0, "no loads, trying stores"),
        ((3, 3, 3), 0, "disabled"),
        ((0, 0, 0), 1, "connecting"),
        ((0, 0, 0), 2, "server gone"),
    ],
)
def test_a_tier_that_is_not_in_use_is_the_first_thing_to_say(
    kvtier: Shell,
    page: EnginePage,
    address: str,
    states: tuple[int, ...],
    connection: int,
    shown: str,
) -> None:
    page.count("kvtier:tier_damaged", 3, tier="nvme")
    for work, state in zip(("probes", "loads", "stores"), states, strict=True):
        page.set("kvtier:tier_breaker_state", state, tier="2:redis", work=work)
    page.set("kvtier:tier_connection_state", connection, tier="2:redis")
    (engine,) = kvtier("status", address, status=1)["engines"]
    assert [tier["state"] for tier in engine["tiers"]] == ["in use", "in use", shown]
    assert engine["advice"].startswith("2:redis is not in use")
    assert f"\n2:redis: {shown}\n" in kvtier.shown("status", address, status=1)


def test_what_went_wrong_stands_before_what_could_be_better(
    kvtier: Shell, page: EnginePage, address: str
) -> None:
    def advice() -> str:
        (engine,) = kvtier("status", address)["engines"]
        return str(engine["advice"])

    assert "No request has loaded anything" in advice()
    page.count("kvtier:hits_if_larger", 50, tier="nvme", times="2")
    assert advice() == "nvme would have hit 50 blocks more at twice its size: raise capacity_bytes."
    page.count("kvtier:hits_if_larger", 50, tier="0:primary", times="2")
    assert "raise cpu_bytes_to_use" in advice()
    page.count("kvtier:tier_jobs_timed_out", 2, tier="nvme")
    assert "nvme is in use, and its storage hung" in advice()
    page.count("kvtier:tier_damaged", 7, tier="2:redis")
    assert "2:redis is in use, and blocks failed their check" in advice()


def test_only_what_a_drive_is_given_to_write_wears_it_out(
    kvtier: Shell, page: EnginePage, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's memory does not wear out, nor does what a tier is given and has already."""
    monkeypatch.setattr("kvtier.tools.watching.shown.AGE_S_MIN", 0.0)
    page.count("kvtier:loaded_tokens", 1, tier="nvme")
    for tier in ("nvme", "2:redis"):
        page.set("kvtier:tier_capacity_bytes", 1e9, tier=tier)
        page.observe("kvtier:tier_store_bytes", 1e12, tier=tier)
    page.count("kvtier:disk_bytes_stored", 0, tier="nvme")
    assert "nothing is wrong" in kvtier.shown("status", address)
    page.count("kvtier:disk_bytes_of_tables", 1e12, tier="nvme")
    (engine,) = kvtier("status", address)["engines"]
    assert engine["advice"].startswith("nvme writes its capacity")
    assert [tier["drive_bytes"] for tier in engine["tiers"]] == [None, 1e12, None]


def test_a_tier_tells_its_faults_and_one_is_no_news_after_an_hour(
    kvtier: Shell, page: EnginePage, address: str
) -> None:
    page.count("kvtier:loaded_tokens", 19_840, tier="nvme")
    page.count("kvtier:tier_jobs_timed_out", 2, tier="nvme")
    page.count("kvtier:tier_damaged", 7, tier="nvme")
    last = "kvtier:tier_last_fault_timestamp_seconds"
    page.set(last, time.time() - 7200, tier="nvme", fault="damaged")
    page.set(last, time.time() - 300, tier="nvme", fault="jobs_timed_out")
    shown = kvtier.shown("status", address)
    assert "nvme: damaged 7, the last 2.0 h ago; jobs_timed_out 2, the last 5.0 min ago" in shown
    assert "nvme is in use, and its storage hung" in shown
    page.set(last, time.time() - 7200, tier="nvme", fault="jobs_timed_out")
    shown = kvtier.shown("status", address)
    assert "jobs_timed_out 2, the last 2.0 h ago" in shown
    assert "nothing is wrong" in shown


def test_status_of_some_seconds_has_what_came_in_them(
    kvtier: Shell, page: EnginePage, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.count("kvtier:loaded_tokens", 19_840, tier="nvme")

    def work(_seconds: float) -> None:
        page.count("kvtier:loaded_tokens", 160, tier="nvme")

    monkeypatch.setattr(status, "_wait", work)
    (engine,) = kvtier("status", address, "--seconds", 60)["engines"]
    assert engine["tiers"][1]["loaded_tokens"] == 160
    assert engine["at_s"] >= engine["began_s"]
    shown = kvtier.shown("status", address, "--seconds", 60)
    assert re.search(r"tier +state +used +60 s ", shown)
    assert re.search(r"nvme +in use +- +160 ", shown)
    assert "--seconds 0" in kvtier.refused("status", address, "--seconds", 0)


def test_what_does_not_answer_is_told_beside_what_does(
    kvtier: Shell, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that nobody listens on, one that never answers, another page, another program."""
    monkeypatch.setattr(pages, "ANSWER_S_MAX", 0.5)
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as mute:
        closed.bind(("127.0.0.1", 0))
        dead, silent = (f"127.0.0.1:{each.getsockname()[1]}" for each in (closed, mute))
        other = EnginePage()
        with other.served() as elsewhere:
            found = kvtier("status", address, dead, silent, elsewhere, status=1)
    assert [engine["url"] for engine in found["engines"]] == [f"http://{address}/metrics"]
    why = {url.split("/")[2]: text for url, text in found["silent"].items()}
    assert "refused" in why[dead]
    assert "timed out" in why[silent]
    assert "no metrics of kvtier" in why[elsewhere]


def test_every_fault_has_a_remedy_and_a_time() -> None:
    assert [*FAULTS] == [*get_args(TierFault)]


def test_a_page_of_another_version_is_told(kvtier: Shell, page: EnginePage, address: str) -> None:
    page.set("kvtier:tier_breaker_state", 7, tier="nvme", work="loads")
    (why,) = kvtier("status", address, status=1)["silent"].values()
    assert "not those of this version" in why
    (finding,) = kvtier("doctor", address, status=1)["findings"]
    assert "not those of this version" in finding["what"]


def test_a_page_that_is_none_is_told() -> None:
    with pytest.raises(pages.NoPage, match="shows no metrics"):
        pages.Page("kvtier:info{ 1\n")


def test_the_engines_of_a_server_are_told_apart(kvtier: Shell) -> None:
    page = EnginePage("0", "1")
    page.count("kvtier:loaded_tokens", 5, "1", tier="nvme")
    with page.served() as address:
        engines = kvtier("status", f"http://{address}/metrics")["engines"]
    assert [each["tiers"][1]["loaded_tokens"] for each in engines] == [0, 5]


def test_an_address_that_is_none_is_refused(kvtier: Shell) -> None:
    assert "ftp://x" in kvtier.refused("status", "ftp://x")
    assert page_url("http://a:1/") == page_url("a:1") == "http://a:1/metrics"


def test_quantiles_are_those_of_prometheus() -> None:
    """Linear within a bucket; beyond the last bound, that bound."""
    counted = Histogram({1.0: 2, 2.0: 6, float("inf"): 8}, 12.0)
    assert [counted.quantile(each) for each in (0.125, 0.5, 0.99)] == [0.5, 1.5, 2.0]
    assert counted.since(Histogram({1.0: 2, 2.0: 2, float("inf"): 4}, 0.0)).quantile(0.5) == 1.5
    assert Histogram({}, 0.0).quantile(0.5) is None


def reading(at_s: float, tokens: float, began_s: float = 0.0) -> EngineReading:
    tier: dict[str, Any] = dict.fromkeys(TierReading.__struct_fields__, 0.0)
    tier |= {"name": "nvme", "load_seconds": Histogram({}, 0.0)}
    tier |= {"faults": {}, "last_faults": {}}
    about = dict.fromkeys(("url", "engine", "model", "version", "vllm"), "")
    tiers = (TierReading(**tier | {"loaded_tokens": tokens}),)
    return EngineReading(**about, at_s=at_s, began_s=began_s, prefill_saved_s=tokens, tiers=tiers)


def test_a_window_has_what_has_come_in_it() -> None:
    minute = Window(60.0)
    grown = [minute.add(reading(at, at * 10)).tiers[0].loaded_tokens for at in range(0, 200, 20)]
    assert grown == [0, 200, 400, *[600] * 7]
    hour = Window(3600.0, apart_s=30.0)
    for at in range(0, 10_000, 2):
        told = hour.add(reading(at, at))
    assert 3600 <= told.prefill_saved_s < 3600 + 30
    assert len(hour._readings) < 3600 / 30 + 5


def test_an_engine_that_was_restarted_counts_from_its_start() -> None:
    window = Window(60.0)
    window.add(reading(0, 1000))
    assert window.add(reading(10, 7, began_s=5)).tiers[0].loaded_tokens == 7


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (9999, "9999"), (19_840, "19.8k"), (999_600, "1M"), (2e9, "2G")]
)
def test_numbers_fit_a_narrow_column(count: float, text: str) -> None:
    assert number(count) == text


def test_sizes_have_a_unit_that_fits() -> None:
    shown = [size(each) for each in (0, 999, 4 << 20, 999_700_000, 1.524e9, 2e16)]
    assert shown == ["-", "999 B", "4.2 MB", "1.0 GB", "1.5 GB", "20 PB"]


def test_times_have_a_unit_that_fits() -> None:
    assert [span(each) for each in (5, 119, 121, 7200, 2e5)] == [
        "5 s",
        "119 s",
        "2.0 min",
        "2.0 h",
        "2.3 d",
    ]


def test_top_wants_a_terminal(kvtier: Shell, address: str) -> None:
    assert "kvtier status" in kvtier.refused("top", address)


def fill_columns(page: EnginePage) -> None:
    """Give a tier what is wide in each column."""
    page.count("kvtier:loaded_tokens", 19_840, tier="nvme")
    page.set("kvtier:tier_used_bytes", 760e9, tier="nvme")
    page.set("kvtier:tier_capacity_bytes", 1000e9, tier="nvme")
    page.observe("kvtier:tier_load_seconds", 0.163, tier="nvme")
    page.observe("kvtier:tier_load_bytes", 385e6, tier="nvme")
    page.observe("kvtier:tier_store_bytes", 999e6, tier="nvme")
    for work, state in zip(("probes", "loads", "stores"), (1, 2, 2), strict=True):
        page.set("kvtier:tier_breaker_state", state, tier="nvme", work=work)


def test_the_table_fits_80_columns_whatever_is_in_it(
    kvtier: Shell, page: EnginePage, address: str
) -> None:
    fill_columns(page)
    shown = kvtier.shown("status", address, status=1)
    (nvme,) = re.findall("^ nvme .*$", shown, re.MULTILINE)
    assert re.search(r"nvme +bypassed +76% +19.8k 385 MB 999 MB +[0-9]{3} ms +[0-9]{3} ms", nvme)
    assert "\nnvme: no probes, trying loads+stores\n" in shown
    assert len(nvme.rstrip()) <= 80


@pytest.mark.parametrize(
    ("columns", "left_out"), [(40, "out, p50, p99, a day"), (64, "a day"), (80, None)]
)
def test_a_narrow_terminal_has_fewer_columns_and_whole_figures(
    kvtier: Shell,
    page: EnginePage,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    left_out: str | None,
) -> None:
    fill_columns(page)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = re.sub(r"\x1b\[[0-9;]*m", "", kvtier.shown("status", address, status=1))
    (nvme,) = re.findall("^ nvme .*$", shown, re.MULTILINE)
    assert re.search(r"nvme +bypassed +76% +19.8k 385 MB", nvme)
    assert "…" not in shown
    assert len(nvme.rstrip()) <= columns
    assert (f"Too narrow for: {left_out}" in shown) is (left_out is not None)


def test_top_draws_in_80_columns_and_ends_at_ctrl_c(page: EnginePage, address: str) -> None:
    fill_columns(page)
    process, terminal = pty.fork()
    if process == 0:
        os.environ["TERM"] = "xterm"
        command = "from kvtier.tools.cli.main import main; raise SystemExit(main())"
        os.execv(sys.executable, [sys.executable, "-c", command, "top", address])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    drawn = ""
    while "is not in use" not in drawn:
        drawn += os.read(terminal, 1 << 16).decode()
    os.kill(process, signal.SIGINT)
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:  # its other end is closed
        pass
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == INTERRUPTED
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn).splitlines()
    (nvme,) = [line for line in lines if line.strip().startswith("nvme ")][:1]
    assert re.fullmatch(r" *nvme +bypassed +76% +0 +0 +- +- +- +- +- *", nvme), nvme
    assert len(nvme.rstrip()) <= 80
