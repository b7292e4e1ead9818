"""Readings of an engine and its tiers from one scrape, and differences of two readings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from kvtier.core import metrics
from kvtier.core.metrics import PRIMARY_TIER, counter_series
from kvtier.core.statistics import PrimaryCounts, SourceCounts, TierCounts
from kvtier.engine.link.circuit_breaker import BreakerState
from kvtier.plugin_api.backend import Connection

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtier.core.metrics import TierFault
    from kvtier.tools.watching.page import Histogram, Page

OF_SOURCE: Final = {each.attribute: each.metric for each in counter_series(SourceCounts, "")}
OF_TIER: Final = {each.attribute: each.metric for each in counter_series(TierCounts, "tier_")}
OF_PRIMARY: Final = {
    each.attribute: each.metric for each in counter_series(PrimaryCounts, "primary_")
}
"""Names of metrics, by the attributes of the counters."""

VLLMS_QUERIES: Final = "vllm:kv_offload_tiering_chunk_queries"
VLLMS_HITS: Final = "vllm:kv_offload_tiering_chunk_hits"
_DRIVE_WRITES: Final = [
    f"kvtier:disk_bytes_{of}_total" for of in ("stored", "reinserted", "of_tables")
]
"""All that a ``disk`` tier writes; nothing else is known to wear a drive."""


class FaultMeaning(NamedTuple):
    """Meaning of growth of a counter of ``TierCounts``. Both are clauses."""

    about: str
    remedy: str


FAULTS: Final[Mapping[TierFault, FaultMeaning]] = {
    "crashes": FaultMeaning(
        "it could not be opened, its code raised, or its process ended", "look at the log"
    ),
    "damaged": FaultMeaning("blocks failed their check", "look at the storage"),
    "stores_rejected": FaultMeaning(
        "it had no room for blocks", "free some space, or lower capacity_bytes"
    ),
    "failed": FaultMeaning("loads or stores failed at the storage", "look at the log"),
    "jobs_timed_out": FaultMeaning("its storage hung", "look at the log"),
    "breaker_opened": FaultMeaning("it was bypassed for a time", "look at the log"),
    "connections_lost": FaultMeaning("its server was away", "look at the log"),
}
"""By the counter; the worst first."""

MORE: Final = 1 / 5
"""Share of additional hits of a larger tier, of the loaded blocks, that is worth advice."""

IN_USE: Final = "in use"

_WORDS: Final = {BreakerState.OPEN: "no", BreakerState.HALF_OPEN: "trying"}


class TierReading(msgspec.Struct, frozen=True):
    """One tier. Counters are from the start of its engine on."""

    name: str
    state: str  #: ``IN_USE``, or the parts that are not in use
    used_bytes: float | None
    capacity_bytes: float | None
    hits: float  #: blocks
    loaded_tokens: float
    read_bytes: float
    written_bytes: float  #: of blocks that it has taken, those among them that it had already
    drive_bytes: float | None  #: written to its drive; None if it is no ``disk`` tier
    load_seconds: Histogram
    hits_if_twice: float  #: blocks
    faults: dict[TierFault, float]  #: those above 0
    last_faults: dict[TierFault, float]  #: the last increase of each, in seconds since the epoch

    def figures(self) -> dict[str, Any]:
        """Return all of it as JSON has it: the fields, with quantiles for the histogram."""
        fields = asdict(self)
        loads = fields.pop("load_seconds")
        return fields | {f"load_p{n}_s": loads.quantile(n / 100) for n in (50, 99)}

    @property
    def is_too_small(self) -> bool:
        """Whether a larger tier is worth advice."""
        return self.hits_if_twice > MORE * max(1.0, self.hits)

    def since(self, before: TierReading) -> TierReading:
        """Return the tier's present state, with the growth of its counters since then."""
        return replace(
            self,
            hits=self.hits - before.hits,
            loaded_tokens=self.loaded_tokens - before.loaded_tokens,
            read_bytes=self.read_bytes - before.read_bytes,
            written_bytes=self.written_bytes - before.written_bytes,
            drive_bytes=_grown(self.drive_bytes, before.drive_bytes),
            load_seconds=self.load_seconds.since(before.load_seconds),
            hits_if_twice=self.hits_if_twice - before.hits_if_twice,
            faults={
                name: grown
                for name, count in self.faults.items()
                if (grown := count - before.faults.get(name, 0))
            },
        )


def _grown(now: float | None, before: float | None) -> float | None:
    return None if now is None else now - (before or 0.0)


class EngineReading(msgspec.Struct, frozen=True):
    """One engine, at one moment."""

    url: str
    engine: str  #: its number in the server
    model: str
    version: str
    vllm: str
    at_s: float  #: when it was read, and ...
    began_s: float | None  #: ... when it began to count, in seconds of the epoch
    prefill_saved_s: float
    tiers: tuple[TierReading, ...]  #: the primary tier first

    @property
    def name(self) -> str:
        """The labels that identify it."""
        return f"{self.url} {self.engine}"

    @property
    def is_healthy(self) -> bool:
        """Whether each tier is in use."""
        return all(tier.state == IN_USE for tier in self.tiers)

    @property
    def age_s(self) -> float:
        """The seconds for which it has counted."""
        return 0.0 if self.began_s is None else max(0.0, self.at_s - self.began_s)

    def figures(self) -> dict[str, Any]:
        """Return all of it as JSON has it: the fields, and those of each tier."""
        return {**asdict(self), "tiers": [tier.figures() for tier in self.tiers]}

    def since(self, before: EngineReading) -> EngineReading:
        """Return the engine's present state, with the growth of its counters since then.

        If the engine has been restarted since, the counters are returned whole.
        """
        if before.began_s != self.began_s or len(before.tiers) != len(self.tiers):
            return self
        both = zip(self.tiers, before.tiers, strict=True)
        return replace(
            self,
            began_s=before.at_s,
            prefill_saved_s=self.prefill_saved_s - before.prefill_saved_s,
            tiers=tuple(now.since(then) for now, then in both),
        )


def read_engines(url: str, page: Page) -> list[EngineReading]:
    """Return the engines of a page: none if kvtier runs in none of them."""
    at_s = time.time()
    return [
        _read_engine(url, page, dict(labels), at_s) for labels, _ in page.series(metrics.INFO.name)
    ]


def _read_engine(url: str, page: Page, labels: dict[str, str], at_s: float) -> EngineReading:
    of_engine = {"engine": labels.get("engine", "0")}
    names = [PRIMARY_TIER, *filter(None, labels["tiers"].split(","))]
    began = (
        value for _, value in page.series(OF_SOURCE["loaded_tokens"] + "_created", **of_engine)
    )
    return EngineReading(
        url=url,
        engine=of_engine["engine"],
        model=labels.get("model_name", ""),
        version=labels["version"],
        vllm=labels["vllm"],
        at_s=at_s,
        began_s=min(began, default=None),
        prefill_saved_s=page.total(OF_PRIMARY["prefill_saved_seconds"], **of_engine),
        tiers=tuple(_read_tier(page, name, {**of_engine, "tier": name}) for name in names),
    )


def _read_tier(page: Page, name: str, labels: dict[str, str]) -> TierReading:
    grown = ((each, page.total(OF_TIER[each], **labels)) for each in FAULTS)
    drive = [value for name in _DRIVE_WRITES for _, value in page.series(name, **labels)]
    return TierReading(
        name=name,
        state=", ".join(_states(page, labels)) or IN_USE,
        used_bytes=page.gauge(metrics.USED.name, **labels),
        capacity_bytes=page.gauge(metrics.CAPACITY.name, **labels),
        hits=page.total(VLLMS_HITS, **labels),
        loaded_tokens=page.total(OF_SOURCE["loaded_tokens"], **labels),
        read_bytes=page.histogram(metrics.LOAD_BYTES.name, **labels).total,
        written_bytes=page.histogram(metrics.STORE_BYTES.name, **labels).total,
        drive_bytes=sum(drive) if drive else None,
        load_seconds=page.histogram(metrics.LOAD_SECONDS.name, **labels),
        hits_if_twice=page.total(OF_SOURCE["hits_if_twice"], **labels, times="2"),
        faults={each: count for each, count in grown if count},
        last_faults={
            each: at_s
            for each in FAULTS
            if (at_s := page.gauge(metrics.LAST_FAULT.name, **labels, fault=each)) is not None
        },
    )


def _states(page: Page, labels: dict[str, str]) -> Iterator[str]:
    """Yield the parts of a tier that are not in use."""
    found = [
        (BreakerState(int(value)), each["work"])
        for each, value in page.series(metrics.BREAKER.name, **labels)
    ]
    if any(state is BreakerState.DISABLED for state, _ in found):
        yield "disabled"
        return
    connection = page.gauge(metrics.CONNECTION.name, **labels)
    if connection is not None and Connection(int(connection)) is not Connection.UP:
        yield "server gone" if Connection(int(connection)) is Connection.GONE else "connecting"
    for state, word in _WORDS.items():
        works = [work for each, work in found if each is state]
        if works:
            yield f"{word} {'+'.join(works)}"
