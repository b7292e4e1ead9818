"""Watch an engine as its operators would: ``python -m stress.monitored --report FILE``.

First the engine is well, then it has each fault in turn. What is checked: each query of the
dashboard has an answer, so has each of vLLM's and of llm-d's dashboards about offloading, no alert
fires while all is well, and each fires on its fault. ``--report`` has what was found, and the
panels' data over the whole run. Windows and waiting times are a sixtieth of those that are shipped.
Needs vLLM and Prometheus; a full filesystem needs the right to mount one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import yaml
from prometheus_client import start_http_server

from kvtier.tools.monitoring.alerts import ALERTS, RECORDED, rules
from kvtier.tools.monitoring.rows import filled_in, rows
from stress.engine.small_disk import small_disk
from stress.monitored.prometheus import ENVIRONMENT, SCRAPE_S, Prometheus, faster, prometheus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.tools.monitoring.questions import Figure
    from stress.monitored.engine import Load
    from stress.monitored.faults import Fault

TIMES: Final = 60.0
WELL_S: Final = 150.0
"""Longer than the longest window, an hour, and the longest waiting time after it."""

SERVERS_MEMORY: Final = {"maxmemory": "400mb", "maxmemory-policy": "allkeys-lru"}

FIRES_S: Final = 90.0
OVER_S: Final = 300.0
QUIET_S: Final = 10.0
WINDOW: Final = "1h"
POINTS: Final = 200

OFFLOADING_OF_OTHERS: Final = {
    # vLLM's examples/observability/dashboards/grafana/vllm_kv_cache.json, row "KV offloading"
    "throughput, loads": "sum(rate(vllm:kv_offload_load_bytes_total[1m]))",
    "throughput, stores": "sum(rate(vllm:kv_offload_store_bytes_total[1m]))",
    "bandwidth, loads": (
        "sum(rate(vllm:kv_offload_load_bytes_total[1m])) "
        "/ (sum(rate(vllm:kv_offload_load_time_total[1m])) > 0)"
    ),
    "bandwidth, stores": (
        "sum(rate(vllm:kv_offload_store_bytes_total[1m])) "
        "/ (sum(rate(vllm:kv_offload_store_time_total[1m])) > 0)"
    ),
    "mean size of a load": (
        "sum(rate(vllm:kv_offload_load_size_sum[1m])) "
        "/ (sum(rate(vllm:kv_offload_load_size_count[1m])) > 0)"
    ),
    "mean size of a store": (
        "sum(rate(vllm:kv_offload_store_size_sum[1m])) "
        "/ (sum(rate(vllm:kv_offload_store_size_count[1m])) > 0)"
    ),
    "lookups, sync": (
        "histogram_quantile(0.99, sum by (le) "
        "(rate(vllm:kv_offload_lookup_sync_delay_seconds_bucket[1m])))"
    ),
    "lookups, async": (
        "histogram_quantile(0.99, sum by (le) "
        "(rate(vllm:kv_offload_lookup_async_delay_seconds_bucket[1m])))"
    ),
    "buffer in use": "max(vllm:kv_offload_cpu_cache_usage_perc)",
    "buffer in use by stores": "max(vllm:kv_offload_cpu_cache_write_usage_perc)",
    "buffer in use by loads": "max(vllm:kv_offload_cpu_cache_read_usage_perc)",
    # llm-d's list of queries for its dashboards, "KV Offload …"
    "llm-d: throughput": "sum by (transfer_type) (rate(vllm:kv_offload_total_bytes_total[5m]))",
    "llm-d: latency": "sum by (transfer_type) (rate(vllm:kv_offload_total_time_total[5m]))",
    "llm-d: size": (
        "histogram_quantile(0.99, sum by (le, transfer_type) "
        "(rate(vllm:kv_offload_size_bucket[5m])))"
    ),
    "llm-d: read from a tier": (
        'sum(increase(vllm:kv_offload_tiering_read_bytes_total{tier!="0:primary"}[5m]))'
    ),
}
"""Queries that others' dashboards have for the names that kvtier fills, too."""


class Watched:
    """One engine and its Prometheus."""

    def __init__(self, asked: Prometheus, load: Load, tiers: tuple[str, ...]) -> None:
        self._asked = asked
        self._load = load
        self._tiers = tiers
        self.began = time.time()

    def run_well(self) -> set[str]:
        """Send requests for a time; return the alerts that fired."""
        fired: set[str] = set()
        until = time.time() + WELL_S
        while time.time() < until:
            self._load.send()
            fired |= self._found("firing").keys()
        return fired

    def empty(self, queries: dict[str, str]) -> list[str]:
        """Return those of the queries that have no answer now, or none that is a number."""
        at = self._asked.wait_for_scrape()
        answers = {title: self._asked.ask(query, at) for title, query in queries.items()}
        return [
            title
            for title, series in answers.items()
            if not series or all(each["value"][1] == "NaN" for each in series)
        ]

    def run_fault(self, fault: Fault) -> dict[str, Any]:
        """Have a fault until its alerts fire; return after how many seconds each was seen."""
        began = time.time()
        fault.begin()
        fired: dict[str, float] = {}
        seen: dict[str, float] = {}
        try:
            while not set(fault.alerts) <= fired.keys() and time.time() < began + FIRES_S:
                self._load.send()
                fault.again()
                for name, since in self._found("pending", "firing").items():
                    seen.setdefault(name, max(0.0, since - began))
                for name in self._found("firing"):
                    fired.setdefault(name, time.time() - began)
        finally:
            fault.end()
        return {"seen_s": seen, "fired_s": fired, "over_s": self._run_until_over()}

    def _run_until_over(self) -> float:
        """Return how long it took until no alert fired any more, and none came back."""
        began = quiet = time.time()
        while time.time() < quiet + QUIET_S:
            self._load.send()
            if self._found("pending", "firing"):
                quiet = time.time()
            if time.time() > began + OVER_S:
                return float("inf")
        return quiet - began

    def _found(self, *states: str) -> dict[str, float]:
        """Return the alerts in one of these states, with the time since when."""
        return {
            each["labels"]["alertname"]: _time_of(each["activeAt"])
            for each in self._asked.alerts()
            if each["state"] in states
        }

    def panels(self) -> list[dict[str, Any]]:
        """Return the data of all panels, over the whole run."""
        end = time.time()
        step = (end - self.began) / POINTS
        return [
            {
                "row": row,
                "title": figure.title,
                "unit": figure.unit,
                "kind": figure.kind,
                "series": self._asked.ask_range(figure.query, self.began, end, step),
            }
            for row, figure in self.dashboard()
        ]

    def dashboard(self) -> Iterator[tuple[str, Figure]]:
        """Yield the dashboard's figures with their rows, as Grafana asks for them."""
        for row in rows():
            for tier in self._tiers if row.for_each else ("|".join(self._tiers),):
                title = row.title.replace("$tier", tier)
                for figure in row.figures:
                    query = faster(filled_in(figure.query, tier, WINDOW), TIMES)
                    yield title, figure._replace(query=query)


def _time_of(text: str) -> float:
    return datetime.fromisoformat(f"{text[:19]}Z").timestamp()


def write_rules(file: Path) -> None:
    """Write the rules with short windows and waiting times."""
    made = rules()
    for group in made["groups"]:
        group["interval"] = f"{SCRAPE_S:g}s"
        for rule in group["rules"]:
            rule["expr"] = faster(rule["expr"], TIMES)
            if "for" in rule:
                rule["for"] = faster(rule["for"], TIMES)
    file.write_text(yaml.safe_dump(made))


def main() -> int:
    """Run; returns 0 if all is as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, required=True, help="where to write what was found")
    parser.add_argument("--faults", help="only these: hung,killed,crashes,damaged,lost,server,full")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is started ends, then
    os.environ.update(ENVIRONMENT)
    from stress.monitored import engine  # noqa: PLC0415 - vLLM reads the environment at its import
    from stress.monitored.faults import faults_of  # noqa: PLC0415 - as above
    from stress.remote.valkey_server import ValkeyServer  # noqa: PLC0415 - as above

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="kvtier-monitored-")))
        volume = stack.enter_context(small_disk(folder / "small"))
        shared = folder / "small" / "kv"
        server = ValkeyServer(folder / "server", SERVERS_MEMORY)
        stack.callback(server.end)
        server.start()
        llm = engine.start(folder, shared, f"redis://127.0.0.1:{server.port}")
        stack.callback(llm.llm_engine.engine_core.shutdown)
        metrics, _ = start_http_server(0, "127.0.0.1")
        write_rules(folder / "rules.yml")
        asked = stack.enter_context(prometheus(folder, metrics.server_port, folder / "rules.yml"))
        watched = Watched(asked, engine.Load(llm), (engine.DISK, engine.FOLDER, engine.SERVER))
        report: dict[str, Any] = {"alerts_while_well": sorted(watched.run_well())}
        panels = {f"{row}: {figure.title}": figure.query for row, figure in watched.dashboard()}
        report["empty"] = watched.empty(panels | {name: name for name in RECORDED})
        report["empty_of_others"] = watched.empty(OFFLOADING_OF_OTHERS)
        print(json.dumps(report), flush=True)
        report["faults"] = {}
        found = faults_of(shared, volume, server)
        for name in arguments.faults.split(",") if arguments.faults else found:
            report["faults"][name] = {
                "about": found[name].about,
                "expected": found[name].alerts,
                "began_s": time.time() - watched.began,
                **watched.run_fault(found[name]),
            }
            print(name, json.dumps(report["faults"][name]), flush=True)
        report["holds"] = {alert.name: alert.holds for alert in ALERTS}
        report["panels"] = watched.panels()
    arguments.report.write_text(json.dumps(report))
    return int(bool(wrong(report)))


def wrong(report: dict[str, Any]) -> list[str]:
    """Return what is not as it must be."""
    found = [f"{name} fires, and nothing is wrong" for name in report["alerts_while_well"]]
    found += [f"no answer: {each}" for each in report["empty"] + report["empty_of_others"]]
    for name, fault in report["faults"].items():
        missing = set(fault["expected"]) - fault["fired_s"].keys()
        found += [f"{name}: {each} does not fire" for each in sorted(missing)]
        if fault["over_s"] == float("inf"):
            found.append(f"{name}: alerts do not end with it")
    for each in found:
        print(each, file=sys.stderr)
    return found


if __name__ == "__main__":
    sys.exit(main())
