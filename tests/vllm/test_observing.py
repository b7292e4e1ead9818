"""Metrics, events and labels: what fails in them is dropped and counted, and never ends vLLM."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

import pytest
from hypothesis import given, strategies
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, values
from prometheus_client.multiprocess import MultiProcessCollector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    OffloadPromMetrics,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import Request

from kvtier.core import metrics as own
from kvtier.core.events import EventKind
from kvtier.core.statistics import (
    Counts,
    Observations,
    PrimaryCounts,
    PrimaryStatistics,
    SourceCounts,
    Statistics,
    TierCounts,
    TierObservations,
    TierStatistics,
)
from kvtier.engine.facade import SchedulerFacade
from kvtier.engine.link.tier_link import TierLink
from kvtier.engine.primary.primary_tier import PrimaryTier
from kvtier.settings.extra_config import read_settings
from kvtier.vllm import KVTierOffloadingSpec
from kvtier.vllm.scheduler import metrics
from kvtier.vllm.scheduler.kv_events import KVEvents
from kvtier.vllm.scheduler.manager import KVTierManager
from kvtier.vllm.scheduler.metrics import MetricsExporter
from kvtier.vllm.scheduler.request_report import REPORT, RequestReports
from kvtier.vllm.workarounds.guarded_observer import DROPS, GuardedObserver, Sample
from tests.support.patience import PATIENCE_S, until
from tests.vllm.support.connector import connector
from tests.vllm.support.engine import kvtier_config
from tests.vllm.support.managers import manager

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

TIERS = [
    {"type": "memory", "capacity_bytes": 1 << 20},
    {"type": "memory", "capacity_bytes": 1 << 20},
]
EXTRA = kvtier_config(secondary_tiers=TIERS, store_threshold=2)
CONFIG = read_settings(EXTRA, slot_count=8, block_bytes=4096)
DROPPED = "kvtier:samples_dropped"


class FrontEnd:
    """vLLM's own end: what its front end makes of the statistics, with a registry of its own."""

    def __init__(self, extra_config: Mapping[str, Any]) -> None:
        self.registry = CollectorRegistry()
        transfer = type("Transfer", (), {"kv_connector_extra_config": extra_config})
        self._metrics = OffloadPromMetrics(
            type("Config", (), {"kv_transfer_config": transfer}),
            {kind: partial(kind, registry=self.registry) for kind in (Counter, Gauge, Histogram)},
            ["engine"],
            {0: ["0"]},
        )

    def take(self, stats: OffloadingConnectorStats | None) -> None:
        """Do all that vLLM does with the statistics of a step."""
        if stats is None:
            return
        both = OffloadingConnectorStats().aggregate(stats)
        both.reduce()
        self._metrics.observe(both.data)

    def value(self, metric: str, **labels: str) -> float | None:
        """Return what a scrape would see."""
        return self.registry.get_sample_value(metric, {"engine": "0", **labels})

    def samples(self) -> dict[str, list[tuple[str, ...]]]:
        """Return the labels of each metric that has any sample."""
        return {
            family.name: [tuple(sample.labels.values()) for sample in family.samples]
            for family in self.registry.collect()
            if family.samples
        }


# --- what is counted is exported ---


PRIMARY_COUNTERS = [*metrics._PRIMARY_COUNTERS, metrics._STORES_SKIPPED]


@pytest.mark.parametrize(
    ("kind", "counters"),
    [
        (TierCounts, metrics._tier_counters("1:memory")),
        (PrimaryCounts, PRIMARY_COUNTERS),
        (SourceCounts, own.counter_series(SourceCounts, "", ("1:memory",))),
    ],
)
def test_each_counter_reaches_vllm_once(kind: type[Counts], counters: list[Any]) -> None:
    """And no counter is read that is not there."""
    read = sorted(each.attribute for each in counters)
    assert read == sorted(kind.__struct_fields__)


def test_a_counter_that_is_not_there_is_no_attribute_of_a_snapshot_either() -> None:
    """A renamed one is an error wherever it is still read by its old name."""
    counts = TierCounts()
    taken = counts.snapshot()
    counts.load_misses += 1
    assert taken.load_misses == 0
    assert taken != counts
    with pytest.raises(AttributeError):
        taken.missing  # type: ignore[attr-defined] # noqa: B018 - that is what is tested


def has_reported(facade: SchedulerFacade) -> bool:
    """Return whether every backend's own gauges have come from its tier's thread."""
    facade.step_end()
    return all(tier.backend_gauges for tier in facade.statistics().tiers)


AT_WORK = {
    each.name
    for each in (
        own.LATENCY,
        own.BYTES_PER_SECOND,
        own.LOOKUPS_PER_SECOND,
        own.ERROR_RATIO,
        own.INFLIGHT_LIMIT,
        own.LOAD_SECONDS,
        own.LOAD_BYTES,
        own.STORE_SECONDS,
        own.STORE_BYTES,
        own.WAIT_SECONDS,
        own.ABSENT_SECONDS,
        own.LAST_FAULT,
    )
}
"""Of a tier that has done something, or had a fault."""


def test_every_counter_is_there_from_the_first_step_on_with_all_labels() -> None:
    """A rate that first sees a series with its first event misses that event."""
    front = FrontEnd(EXTRA)
    with manager(secondary_tiers=TIERS, store_threshold=2) as ours:
        assert ours.has_pending_work(), "an idle engine would not step"
        ours.facade.step_end()
        front.take(ours.get_stats())
        first = front.samples().keys()
        until(lambda: has_reported(ours.facade))
        front.take(ours.get_stats())
    assert front.samples().keys() - first <= {"kvtier:memory_blocks"}
    assert front.value("kvtier:memory_stores_full_total", tier="2:memory") == 0
    assert front.value("kvtier:tier_capacity_bytes", tier="2:memory") == 1 << 20
    for tier in ("1:memory", "2:memory"):
        for metric, label, _ in metrics._tier_counters(tier):
            assert label == (tier,)
            assert front.value(f"{metric}_total", tier=tier) == 0, (metric, tier)
    for metric, label, _ in metrics._PRIMARY_COUNTERS:
        names = ["outcome" if metric == "kvtier:load_decisions" else "tier"] * len(label)
        labels = dict(zip(names, label, strict=True))
        assert front.value(f"{metric}_total", **labels) == 0, metric
    assert front.value("vllm:kv_offload_stores_skipped_total") == 0
    assert front.value("kvtier:faults_total") == 0
    for what in DROPS:
        assert front.value(f"{DROPPED}_total", what=what) == 0
    shown = {name for name in front.samples() if name.startswith("kvtier:")}
    declared = {name for name in KVTierOffloadingSpec.metrics(EXTRA) if name.startswith("kvtier:")}
    assert shown | AT_WORK == declared


def test_with_several_api_servers_a_gauge_is_there_once_as_it_was_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine tells one of them: a breaker that had closed stayed open in the other's page."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    servers = []
    for process in ("1", "2"):
        kept_by = values.MultiProcessValue(lambda process=process: process)
        monkeypatch.setattr(values, "ValueClass", kept_by)
        servers.append(FrontEnd(EXTRA))
    label = ("1:memory", "loads")
    for server, state in zip(servers, (3, 0), strict=True):
        stats = OffloadingConnectorStats()
        stats.set_gauge(own.BREAKER.name, state, label)
        server.take(stats)
    page = CollectorRegistry()
    MultiProcessCollector(page)
    labels = {"engine": "0", "tier": "1:memory", "work": "loads"}
    assert page.get_sample_value(own.BREAKER.name, labels) == 0


# --- what raises ---


def broken(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("as broken as can be")


def methods(owner: type) -> Iterator[tuple[type, str]]:
    for name, _ in inspect.getmembers(owner, inspect.isfunction):
        if not name.startswith("__"):
            yield owner, name


PARTS = [
    # ``count_records``: only sets what an engine that records counts.
    *(each for each in methods(MetricsExporter) if each[1] != "count_records"),
    *methods(metrics._Counters),
    *methods(metrics._Tier),
    *methods(Sample),
    *((KVEvents, name) for name in ("drain", "_note", "_announce_waiting", "_forget_undescribed")),
    (KVTierManager, "_all_events"),
    (KVTierManager, "_labels"),
    (RequestReports, "at_end"),
    (SchedulerFacade, "statistics"),
    (SchedulerFacade, "drain_observations"),
    (SchedulerFacade, "report"),
    (SchedulerFacade, "take_events"),
    (PrimaryTier, "statistics"),
    (TierLink, "statistics"),
    (OffloadingConnectorStats, "increase_counter"),
    (OffloadingConnectorStats, "set_gauge"),
    (OffloadingConnectorStats, "observe_histogram"),
]


@pytest.mark.promise(13)
@pytest.mark.parametrize(("owner", "name"), PARTS, ids=lambda each: getattr(each, "__name__", each))
def test_whatever_part_of_observing_raises_vllm_never_sees_it(owner: type, name: str) -> None:
    """Each of these is called in a step of the engine, where one exception ends the server."""
    front = FrontEnd(EXTRA)
    with manager(secondary_tiers=TIERS, store_threshold=2) as ours:
        ours.facade._primary._events.collects = True
        ours.facade._links[0]._loads.pacing._estimate.observe(1, 1.0, 0.0)
        with patch.object(owner, name, broken):
            for _ in range(3):
                ours.facade.step_end()
                ours.facade._primary.account.allocation_sizes.add(3)
                ours.facade._primary.counts.evictions += 1
                ours.facade._primary._events.add(EventKind.LAPSED)
                asks = {"kvtier_report": True}
                ours.on_request_ends(SimpleNamespace(request_id="r", kv_transfer_params=asks))
                front.take(ours.get_stats())
                assert list(ours.take_events()) == []
                assert ours.config_info()
        dropped = sum(ours._watch.dropped.values())
        assert dropped, "the test broke nothing that is called"
        ours.facade._primary.counts.evictions += 1
        ours.facade._cell.activity += 1
        front.take(ours.get_stats())
        seen = sum(front.value(f"{DROPPED}_total", what=what) or 0 for what in DROPS)
        assert seen == dropped
        assert front.value("kvtier:primary_evictions_total")


def test_each_answer_to_a_prompt_gets_its_report() -> None:
    """In the process of the front end, vLLM's requests for them share the client's mapping."""
    asks = {"kv_transfer_params": {REPORT: True, "another's": 1}}
    sampling = SamplingParams(n=2, extra_args=asks)
    parent = ParentRequest(
        EngineCoreRequest(
            "r", [1], None, sampling, None, 0.0, None, None, None, external_req_id="r"
        )
    )
    with manager() as ours:
        for number in range(2):
            name, own_sampling = parent.get_child_info(number)
            request = Request(name, [1], own_sampling, None)
            ours.on_new_request(ReqContext(req_id=name))
            assert ours.on_request_ends(request).keys() == {REPORT}
            assert request.kv_transfer_params == {"another's": 1}


def test_a_step_in_which_nothing_has_happened_has_no_statistics() -> None:
    with manager(secondary_tiers=TIERS) as ours:
        until(lambda: ours.facade.step_end() or ours.get_stats() is None)
        ours.facade._cell.activity += 1
        assert ours.get_stats() is not None
        assert ours.get_stats() is None
        ours._watch.dropped["events"] += 1
        assert ours.get_stats() is not None


def test_while_requests_run_statistics_are_reported_at_intervals_and_when_the_last_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step of a busy engine changes something, and a report costs what many lookups do."""
    monkeypatch.setattr(metrics, "REPORT_S", PATIENCE_S)
    with connector(slots=8) as engine:
        engine.start("long", range(4))
        engine.match("long")
        assert engine.manager.get_stats() is not None
        engine.start("r", range(8))
        engine.complete(engine.end_step(["r"]))
        assert engine.manager.get_stats() is None, "the last report is recent"
        engine.real.request_finished(engine.requests["r"])
        assert engine.manager.get_stats() is None, "a step of the other request reports it"
        engine.real.request_finished(engine.requests["long"])
        assert engine.manager.get_stats() is not None, "a user may read it now"
        engine.finish("long")
        engine.finish("r")
        engine.manager.get_stats()
        engine.manager.facade.touch((), "r")
        assert engine.manager.get_stats() is not None, "no request is left"


def test_what_waits_to_be_told_is_told_before_long() -> None:
    now, facade = [100.0], History()
    exporter = MetricsExporter(
        facade,  # type: ignore[arg-type]
        CONFIG,
        KVTierOffloadingSpec.metrics(EXTRA),
        GuardedObserver(),
        clock=lambda: now[0],
    )
    assert exporter.collect(is_busy=True) is not None
    facade.primary.evictions += 3
    facade.activity += 1
    assert exporter.collect(is_busy=True) is None
    now[0] += metrics.REPORT_S
    told = exporter.collect(is_busy=True)
    assert told is not None
    assert told.data["data"]["kvtier:primary_evictions"] == {(): 3}


@pytest.mark.promise(13)
def test_a_fault_of_one_kind_is_in_the_log_once(capsys: pytest.CaptureFixture[str]) -> None:
    watch = GuardedObserver()
    for _ in range(3):
        assert watch.safely("events", broken) is None
        watch.drop("counter_fell", "kvtier:faults", -1)
    said = capsys.readouterr().out
    assert said.count("observing failed") == 1
    assert said.count("dropping an invalid metric value") == 1
    assert watch.dropped["events"] == watch.dropped["counter_fell"] == 3


# --- what is none of vLLM's numbers ---


class History:
    """A facade whose counters do what they like. It has what the exporter asks for."""

    def __init__(self) -> None:
        self.primary = PrimaryCounts()
        self.tiers = [TierCounts() for _ in TIERS]
        self.sources = [SourceCounts() for _ in range(1 + len(TIERS))]
        self.backends: list[dict[str, Any]] = [{} for _ in TIERS]
        self.faults = 0
        self.activity = 0

    def statistics(self) -> Statistics:
        self.activity += 1
        nothing = dict.fromkeys(
            set(PrimaryStatistics.__struct_fields__)
            - {"slot_count", "counts", "sources", "misses"},
            0,
        )
        known = {"name", "breaker", "breakers", "connection", "counts", "speeds"}
        known |= {"backend_counters", "backend_gauges"}
        idle = dict.fromkeys(set(TierStatistics.__struct_fields__) - known, 0)
        return Statistics(
            primary=PrimaryStatistics(
                slot_count=8,
                counts=self.primary.snapshot(),
                sources=tuple(each.snapshot() for each in self.sources),
                misses=({},) * len(self.sources),
                **nothing,
            ),
            tiers=tuple(
                TierStatistics(
                    name=tier.name,
                    breaker="CLOSED",
                    breakers={},
                    connection="UP",
                    speeds={},
                    counts=counts.snapshot(),
                    backend_counters=dict(backend),
                    backend_gauges=dict(backend),
                    **idle,
                )
                for tier, counts, backend in zip(
                    CONFIG.tiers, self.tiers, self.backends, strict=True
                )
            ),
            faults=self.faults,
        )

    def drain_observations(self) -> Observations:
        none = TierObservations(probe_seconds=[float("nan")], jobs=[])
        return Observations(
            allocation_sizes=[],
            lookup_seconds=[],
            wait_seconds=[],
            absent_seconds=[(0, float("nan"))],
            tiers=(none,) * len(TIERS),
        )


def test_when_a_fault_was_counted_last_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    facade, now = History(), [1000.0]
    monkeypatch.setattr(metrics.time, "time", lambda: now[0])
    exporter = MetricsExporter(
        facade,  # type: ignore[arg-type]
        CONFIG,
        KVTierOffloadingSpec.metrics(EXTRA),
        GuardedObserver(),
    )
    front = FrontEnd(EXTRA)

    def last(fault: str) -> float | None:
        front.take(exporter.collect(is_busy=False))
        name = "kvtier:tier_last_fault_timestamp_seconds"
        return front.value(name, tier="2:memory", fault=fault)

    facade.tiers[1].damaged = 2
    assert (last("damaged"), last("failed")) == (1000.0, None)
    now[0] = 2000.0
    facade.tiers[1].failed = 1
    assert (last("damaged"), last("failed")) == (1000.0, 2000.0)


COUNT = strategies.one_of(strategies.integers(-5, 50), strategies.floats(-5.0, 50.0))
ANYTHING = strategies.one_of(
    strategies.integers(-5, 50),
    strategies.floats(allow_nan=True, allow_infinity=True),
    strategies.sampled_from([10**400, -(10**30), None, "7", True]),
)
STEPS = strategies.lists(
    strategies.lists(
        strategies.one_of(
            strategies.tuples(
                strategies.just("primary"), strategies.sampled_from(["hits", "evictions"]), COUNT
            ),
            strategies.tuples(
                strategies.just("tier"), strategies.sampled_from(["hits", "read_seconds"]), COUNT
            ),
            strategies.tuples(
                strategies.just("backend"),
                strategies.sampled_from(["blocks", "stores_full", "unknown"]),
                ANYTHING,
            ),
            strategies.tuples(strategies.just("restart"), strategies.just(""), strategies.none()),
            strategies.tuples(
                strategies.just("faults"), strategies.just(""), strategies.integers(-5, 5)
            ),
        ),
        max_size=4,
    ),
    max_size=8,
)


@pytest.mark.promise(13)
@given(steps=STEPS)
def test_whatever_counters_do_vllms_front_end_takes_it_and_shows_no_fall(steps: list[Any]) -> None:
    """Counters that fall, backends that begin again at 0, values that are none."""
    facade, watch = History(), GuardedObserver()
    exporter = MetricsExporter(
        facade,  # type: ignore[arg-type]
        CONFIG,
        KVTierOffloadingSpec.metrics(EXTRA),
        watch,
    )
    front = FrontEnd(EXTRA)
    shown = 0.0
    for step in steps:
        for kind, name, value in step:
            if kind == "primary":
                setattr(facade.primary, name, value)
            elif kind == "tier":
                setattr(facade.tiers[1], name, value)
            elif kind == "backend":
                facade.backends[0][name] = value
            elif kind == "faults":
                facade.faults = value
            else:
                facade.backends[0] = {}
                facade.tiers[1] = TierCounts()
        front.take(exporter.collect(is_busy=False))
        now = front.value("kvtier:primary_evictions_total") or 0.0
        assert now >= shown
        shown = now
