"""Serves metrics as an engine does: the definitions of kvtier's, with the values of a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, MetricsHandler

from kvtier.core.metrics import backend_definitions, primary_definitions, tier_definitions
from kvtier_backends.disk.metrics import METRICS as OF_DISK
from tests.support.http_server import http_server

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_KINDS = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}
WORKS = ("probes", "loads", "stores")


class EnginePage:
    """The page of a server, with some engines on two tiers, ``nvme`` and ``2:redis``."""

    def __init__(self, *engines: str) -> None:
        self.registry = CollectorRegistry()
        self._metrics = {}
        of_disk = backend_definitions("disk", OF_DISK)
        for name, each in (primary_definitions() | tier_definitions() | of_disk).items():
            buckets = {"buckets": each.buckets} if each.buckets else {}
            labels = ["engine", *each.labels]
            made = _KINDS[each.kind](name, each.help, labels, registry=self.registry, **buckets)
            self._metrics[name] = made
        hits = "vllm:kv_offload_tiering_chunk_hits"
        self._metrics[hits] = Counter(hits, "", ["engine", "tier"], registry=self.registry)
        for engine in engines:
            about = {"version": "0.1", "vllm": "0.32", "configuration": "c"}
            self.set("kvtier:info", 1, engine, tiers="nvme,2:redis", **about)
            for tier in ("0:primary", "nvme", "2:redis"):
                self.count("kvtier:loaded_tokens", 0, engine, tier=tier)
            for tier in ("nvme", "2:redis"):
                for work in WORKS:
                    self.set("kvtier:tier_breaker_state", 0, engine, tier=tier, work=work)
                self.set("kvtier:tier_connection_state", 0, engine, tier=tier)

    def count(self, name: str, amount: float, engine: str = "0", **labels: str) -> None:
        self._metrics[name].labels(engine=engine, **labels).inc(amount)

    def set(self, name: str, value: float, engine: str = "0", **labels: str) -> None:
        self._metrics[name].labels(engine=engine, **labels).set(value)

    def observe(self, name: str, value: float, engine: str = "0", **labels: str) -> None:
        self._metrics[name].labels(engine=engine, **labels).observe(value)

    def served(self) -> AbstractContextManager[str]:
        """Serve it until the block ends; its value is host:port."""
        return http_server(MetricsHandler.factory(self.registry))
