"""The dashboard and the rules: what they name is there, and the code makes what is shipped."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.tools.cli.main import main
from kvtier.tools.monitoring import promql
from kvtier.tools.monitoring.alerts import ALERTS, RECORDED, rules
from kvtier.tools.monitoring.printed import DASHBOARD, RULES
from kvtier.tools.monitoring.promql import narrowed, unknown_in
from kvtier.tools.monitoring.questions import FIGURES, QUESTIONS
from kvtier.tools.monitoring.rows import filled_in, legend, rows
from kvtier.tools.watching.readings import FAULTS, OF_TIER
from tests.support.docs_scripts import DOCS, docs_script
from tests.support.needs import needs

if TYPE_CHECKING:
    from pathlib import Path

QUERIES = {
    **{f"{row.title}: {each.title}": each.query for row in rows() for each in row.figures},
    **{each["alert"]: each["expr"] for each in rules()["groups"][0]["rules"]},
    **{each["record"]: each["expr"] for each in rules()["groups"][1]["rules"]},
}

STEADY, ONCE = "0+1x1600", "0 5+0x1600"
DAY = "26h"

CASES: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "KvtierTierDisabled": (
        "6m",
        {'kvtier:tier_breaker_state{tier="nvme", work="loads"}': "3+0x10"},
        {'kvtier:tier_breaker_state{tier="nvme", work="loads"}': "3 3 0 3+0x10"},
    ),
    "KvtierTierBypassed": (
        "6m",
        {'kvtier:tier_breaker_state{tier="nvme", work="loads"}': "1 2 1 2 1 2 1 2"},
        {
            'kvtier:tier_breaker_state{tier="nvme", work="loads"}': "1 2 0 1 2 1 2 1",
            'kvtier:tier_breaker_state{tier="broken", work="loads"}': "3+0x10",
        },
    ),
    "KvtierTierCrashes": (
        "6m",
        {'kvtier:tier_crashes_total{tier="nvme"}': "0 1 2 3+0x10"},
        {'kvtier:tier_crashes_total{tier="nvme"}': "0 1 2+0x10"},
    ),
    "KvtierServerGone": (
        "6m",
        {'kvtier:tier_connection_state{tier="cache"}': "1+0x10"},
        {'kvtier:tier_connection_state{tier="cache"}': "2 2 0 2+0x10"},
    ),
    **{
        name: ("15m", {f'{metric}{{tier="nvme"}}': STEADY}, {f'{metric}{{tier="nvme"}}': ONCE})
        for name, metric in {
            "KvtierStorageFails": "kvtier:tier_failed_total",
            "KvtierStorageHangs": "kvtier:tier_jobs_timed_out_total",
        }.items()
    },
    "KvtierStorageFull": (
        "25m",
        {
            'kvtier:tier_stores_rejected_total{tier="nvme"}': "0+100x30",
            'kvtier:tier_sampled_stores_total{tier="nvme"}': "0+50x30",
        },
        {
            'kvtier:tier_stores_rejected_total{tier="nvme"}': "0+80x30",
            'kvtier:tier_sampled_stores_total{tier="nvme"}': "0+50x30",
            'kvtier:tier_stores_rejected_total{tier="idle"}': "0+0x30",
            'kvtier:tier_sampled_stores_total{tier="idle"}': "0+0x30",
        },
    ),
    "KvtierTierStalls": (
        "25m",
        {
            'kvtier:tier_loads_abandoned_total{tier="nvme"}': "0+11x30",
            'vllm:kv_offload_tiering_chunk_hits_total{tier="nvme"}': "0+100x30",
        },
        {
            'kvtier:tier_loads_abandoned_total{tier="nvme"}': "0+9x30",
            'vllm:kv_offload_tiering_chunk_hits_total{tier="nvme"}': "0+100x30",
        },
    ),
    "KvtierMemoryHeld": (
        "15m",
        {'kvtier:primary_slots{state="quarantined"}': "3+0x20"},
        {
            'kvtier:primary_slots{state="quarantined"}': "3 3 3 3 3 3 0 3+0x20",
            'kvtier:primary_slots{state="ready"}': "3+0x20",
        },
    ),
    **{
        name: ("50m", {metric: "0 1+0x60"}, {metric: "1+0x60"})
        for name, metric in {
            "KvtierBlocksDamaged": 'kvtier:tier_damaged_total{tier="nvme"}',
            "KvtierBlocksUnauthenticated": 'kvtier:redis_unauthenticated_total{tier="cache"}',
            "KvtierDefect": "kvtier:faults_total",
            "KvtierRecordsDropped": "kvtier:records_dropped_total",
        }.items()
    },
    "KvtierDriveWears": (
        DAY,
        {
            'kvtier:disk_bytes_stored_total{tier="nvme"}': "0+8x1600",
            'kvtier:disk_bytes_reinserted_total{tier="nvme"}': "0+1x1600",
            'kvtier:disk_bytes_of_tables_total{tier="nvme"}': "0+1x1600",
            'kvtier:tier_capacity_bytes{tier="nvme"}': f"{1440 * 10 / 3.1}+0x1600",
        },
        {
            'kvtier:disk_bytes_stored_total{tier="nvme"}': "0+8x1600",
            'kvtier:disk_bytes_reinserted_total{tier="nvme"}': "0+1x1600",
            'kvtier:disk_bytes_of_tables_total{tier="nvme"}': "0+1x1600",
            'kvtier:tier_capacity_bytes{tier="nvme"}': f"{1440 * 10 / 2.9}+0x1600",
        },
    ),
    "KvtierStoresForNothing": (
        DAY,
        {
            'kvtier:tier_sampled_stores_total{tier="nvme"}': "0+100x1600",
            'kvtier:tier_sampled_reads_total{tier="nvme"}': "0+1.9x1600",
        },
        {
            'kvtier:tier_sampled_stores_total{tier="nvme"}': "0+100x1600",
            'kvtier:tier_sampled_reads_total{tier="nvme"}': "0+2.1x1600",
            'kvtier:tier_sampled_stores_total{tier="young"}': "0+0.5x1600",
            'kvtier:tier_sampled_reads_total{tier="young"}': "0+0x1600",
        },
    ),
    "KvtierNeverHits": (
        DAY,
        {
            'vllm:kv_offload_tiering_chunk_queries_total{tier="nvme"}': STEADY,
            'vllm:kv_offload_tiering_chunk_hits_total{tier="nvme"}': "0+0x1600",
        },
        {
            'vllm:kv_offload_tiering_chunk_queries_total{tier="nvme"}': STEADY,
            'vllm:kv_offload_tiering_chunk_hits_total{tier="nvme"}': "0 0 0 0+0x700 1+0x1600",
            'vllm:kv_offload_tiering_chunk_queries_total{tier="idle"}': "0+0.5x1600",
            'vllm:kv_offload_tiering_chunk_hits_total{tier="idle"}': "0+0x1600",
        },
    ),
    "KvtierLoadsForNothing": (
        "3h",
        {
            'kvtier:tier_loads_wasted_total{tier="nvme"}': "0+21x200",
            'vllm:kv_offload_tiering_chunk_hits_total{tier="nvme"}': "0+100x200",
        },
        {
            'kvtier:tier_loads_wasted_total{tier="nvme"}': "0+19x200",
            'vllm:kv_offload_tiering_chunk_hits_total{tier="nvme"}': "0+100x200",
            'kvtier:tier_loads_wasted_total{tier="idle"}': "0+1x200",
            'vllm:kv_offload_tiering_chunk_hits_total{tier="idle"}': "0+1x200",
        },
    ),
    "KvtierSlowerThanPrefill": (
        "3h",
        {
            'kvtier:load_decisions_total{outcome="load"}': "0+9x200",
            'kvtier:load_decisions_total{outcome="cut"}': "0+2x200",
            'kvtier:load_decisions_total{outcome="recompute"}': "0+8x200",
        },
        {
            'kvtier:load_decisions_total{outcome="load"}': "0+11x200",
            'kvtier:load_decisions_total{outcome="cut"}': "0+2x200",
            'kvtier:load_decisions_total{outcome="recompute"}': "0+8x200",
        },
    ),
}
"""When each alert is looked at, series of which it fires then, and series of which it does not."""


@pytest.mark.parametrize("title", QUERIES)
def test_a_query_names_series_and_labels_that_engines_have(title: str) -> None:
    assert not unknown_in(QUERIES[title])


@pytest.mark.parametrize(
    ("query", "unknown"),
    [
        ("kvtier:shelf_colour", {"kvtier:shelf_colour"}),
        ("sum(rate(kvtier:tier_failed[1h]))", {"kvtier:tier_failed"}),  # counters have _total
        ("vllm:requests_total", {"vllm:requests_total"}),
        ('kvtier:tier_failed_total{colour="red"}', {"kvtier:tier_failed_total{colour}"}),
        ('kvtier:faults_total{tier="nvme"}', {"kvtier:faults_total{tier}"}),
        ("sum by (tier, work) (kvtier:tier_used_bytes)", {"work"}),
        ("kvtier:tier_used_bytes / on (le) kvtier:tier_capacity_bytes", {"le"}),
        ('sum by (why) (label_replace(kvtier:faults_total, "why", "x", "", ""))', set()),
        ("histogram_quantile(1, sum by (le) (kvtier:tier_load_seconds_bucket))", set()),
    ],
)
def test_what_no_engine_has_is_found(query: str, unknown: set[str]) -> None:
    assert unknown_in(query) == unknown


def test_a_metric_that_is_renamed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is: else a query could go on to name one that is gone."""
    for name in {name for query in QUERIES.values() for name in promql.series_in(query)}:
        with monkeypatch.context() as renamed:
            renamed.setattr(promql, "SERIES", {**promql.SERIES, f"{name}s": frozenset()})
            renamed.delitem(promql.SERIES, name)
            assert name in {each for query in QUERIES.values() for each in unknown_in(query)}


def test_a_query_is_narrowed_where_its_series_have_the_label() -> None:
    query = (
        "a(kvtier:tier_damaged_total[1h]) / kvtier:faults_total "
        '+ vllm:prompt_tokens_total{engine="0"}'
    )
    assert narrowed(query, {"tier": '="x"', "engine": '="1"'}) == (
        'a(kvtier:tier_damaged_total{tier="x", engine="1"}[1h]) / kvtier:faults_total{engine="1"} '
        '+ vllm:prompt_tokens_total{engine="0"}'
    )


def test_the_page_asks_the_questions_in_their_words_and_queries() -> None:
    page = (DOCS / "how-to/is-it-helping.md").read_text()
    asked = re.findall(r"^## ([^\n]*\?)\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
    assert [
        (title, re.findall(r"^```promql\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        for title, text in asked
    ] == [(each.title, [figure.query for figure in each.figures]) for each in QUESTIONS]


def test_what_is_shipped_is_what_the_code_makes() -> None:
    """``python docs/write_monitoring.py`` writes it."""
    writer = docs_script("write_monitoring")
    assert DASHBOARD.read_text() == writer.made_dashboard()
    assert RULES.read_text() == writer.made_rules()
    page = writer.PAGE.read_text()
    assert writer.made_page(page) == page
    assert page.count("| `Kvtier") >= len(ALERTS)


@pytest.mark.parametrize(("command", "file"), [("dashboard", DASHBOARD), ("alerts", RULES)])
def test_the_commands_print_it(
    command: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command]) == 0
    assert capsys.readouterr().out == file.read_text()


def panels() -> list[dict[str, Any]]:
    """Return the panels of the dashboard, rows among them."""
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def test_the_dashboard_has_a_row_for_each_question_and_one_for_each_tier() -> None:
    titles = [(each["title"], each.get("repeat")) for each in panels() if each["type"] == "row"]
    assert titles == [
        ("What is wrong", None),
        *((each.title, None) for each in QUESTIONS),
        ("Tier $tier", "tier"),
    ]


def test_no_panel_lies_on_another() -> None:
    places = [each["gridPos"] for each in panels()]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        assert (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
    assert len({each["id"] for each in panels()}) == len(places)


def test_every_variable_of_a_query_is_one_of_the_dashboards() -> None:
    made = json.loads(DASHBOARD.read_text())["templating"]["list"]
    used = {
        name
        for panel in panels()
        for target in panel.get("targets", ())
        for name in re.findall(r"\$(\w+)", target["expr"])
    } - {"1"}  # a group of label_replace
    assert used <= {each["name"] for each in made}
    for row in rows():
        for figure in row.figures:
            assert "$" not in filled_in(figure.query, "nvme", "5m").replace('"$1"', "")


def test_each_counter_that_stands_for_trouble_is_drawn() -> None:
    (drawn,) = (each.query for each in rows()[0].figures if each.title == "Faults of tiers")
    assert promql.series_in(drawn) == {f"{OF_TIER[name]}_total" for name in FAULTS}


def test_each_fault_with_a_remedy_has_an_alert_with_that_remedy() -> None:
    """An operator reads the same in ``kvtier status``, in ``kvtier doctor`` and in an alert."""
    remedies = {each.remedy for each in ALERTS}
    assert {each.remedy for each in FAULTS.values()} <= remedies
    assert all(each.remedy for each in ALERTS)


def test_a_series_is_named_by_what_it_is_grouped_by() -> None:
    assert legend("sum(kvtier:faults_total)") == ""
    assert legend("histogram_quantile(1, sum by (le, tier) (x))") == "{{tier}}"
    replaced = 'sum by (tier) (label_replace(x, "why", "late", "", ""))'
    assert legend(replaced) == "{{tier}}, {{why}}"


def test_records_are_figures_of_the_page() -> None:
    assert set(RECORDED.values()) <= FIGURES.keys()


def promtool(*arguments: str | Path) -> str:
    """Return what it prints, once it has found nothing wrong."""
    ended = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@needs("prometheus")
@pytest.mark.long  # Prometheus is not among what the gate installs: its package starts a service
def test_promtool_takes_the_rules() -> None:
    checked = promtool("check", "rules", "--lint-fatal", RULES)
    assert f"{len(ALERTS) + len(RECORDED)} rules found" in checked


@needs("prometheus")
@pytest.mark.long  # as above
@pytest.mark.parametrize("name", [each.name for each in ALERTS])
def test_an_alert_fires_beyond_its_threshold_and_not_below(name: str, tmp_path: Path) -> None:
    """Of series that are given: no clock is in it."""
    at, *both = CASES[name]
    fires = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
    groups = [
        {
            "interval": "1m",
            "input_series": [
                {"series": _with_labels(series), "values": values}
                for series, values in given.items()
            ],
            "promql_expr_test": [
                {
                    "expr": fires,
                    "eval_time": at,
                    "exp_samples": [{"labels": "{}", "value": 1}] if given is both[0] else [],
                }
            ],
        }
        for given in both
    ]
    (tmp_path / "test.yaml").write_text(json.dumps({"rule_files": [str(RULES)], "tests": groups}))
    promtool("test", "rules", tmp_path / "test.yaml")


def _with_labels(series: str) -> str:
    name, _, labels = series.rstrip("}").partition("{")
    ours = 'instance="a:1", job="vllm", engine="0", model_name="m"'
    return f"{name}{{{ours}{labels and ', '}{labels}}}"
