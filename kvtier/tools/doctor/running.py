"""Rules of running engines, by their ``/metrics``. All figures are since their start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.core import metrics
from kvtier.tools.checking.rules import (
    ENGINES_APART,
    EVICTED_UNREAD,
    NEVER_HIT,
    NO_ENGINE,
    OTHER_FORMATS,
    PREFIX_CACHING_OFF,
    SLOWER_THAN_PREFILL,
    STORES_DROPPED,
    TIER_FAULTS,
    TIER_NOT_IN_USE,
    TOO_SMALL,
    UNAUTHENTICATED,
)
from kvtier.tools.doctor.settings import note_if_untested
from kvtier.tools.watching.readings import (
    FAULTS,
    IN_USE,
    OF_PRIMARY,
    OF_SOURCE,
    OF_TIER,
    VLLMS_QUERIES,
)
from kvtier.tools.watching.scrape import read_pages
from kvtier.tools.watching.shown import sentence
from kvtier_backends.disk.metrics import METRICS as OF_DISK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.tools.checking.findings import Findings
    from kvtier.tools.watching.page import Page
    from kvtier.tools.watching.readings import EngineReading, TierReading

CACHE_CONFIG: Final = "vllm:cache_config_info"
"""vLLM's metric whose labels are the fields of its cache's configuration."""

SHARED_FACTS: Final = ("block_size", "cache_dtype", "prefix_caching_hash_algo")
"""Fields that two engines of one model must have in common to share blocks."""

QUERIES_MIN: Final = 1_000
"""Fewest blocks looked up in a tier before it is reported as never hit."""

WASTED_MIN: Final = 100
WASTED_SHARE: Final = 1 / 5
SLOWER_TOKENS_MIN: Final = 10_000
"""Fewest loaded tokens for which speeds are compared."""

LOADS: Final = "loads"


class RunningEngine(NamedTuple):
    """One engine of a page."""

    reading: EngineReading
    page: Page

    @property
    def labels(self) -> dict[str, str]:
        """The label that the engine's series have."""
        return {"engine": self.reading.engine}

    @property
    def name(self) -> str:
        """The engine's name in findings."""
        return f"{self.reading.url}, engine {self.reading.engine}"

    @property
    def cache_config(self) -> Mapping[str, str]:
        """Fields of vLLM's ``CacheConfig``; empty if the page has none."""
        return next((found for found, _ in self.page.series(CACHE_CONFIG, **self.labels)), {})

    @property
    def prefill_tokens_per_s(self) -> float | None:
        """Its speed at computing prompts, by its own measurement; None: not known."""
        loaded = self.page.total(OF_SOURCE["loaded_tokens"], **self.labels)
        return loaded / self.reading.prefill_saved_s if self.reading.prefill_saved_s else None


def read_running(urls: Sequence[str], wait_s: float, findings: Findings) -> list[RunningEngine]:
    """Read the pages, all at once. Notes those that show no engine with kvtier in time."""
    engines: list[RunningEngine] = []
    for url, read in read_pages(urls, wait_s):
        if isinstance(read, str):
            start_it = "Name the address of an engine's server, and start it."
            findings.add(NO_ENGINE, f"{url}: {read}.", start_it)
        else:
            engines += [RunningEngine(reading, page) for reading, page in read]
    return engines


def look_at_engine(engine: RunningEngine, findings: Findings) -> None:
    """Note the faults of one engine."""
    release = engine.reading.vllm
    note_if_untested(release, f"{engine.name}: it runs vLLM {release}", findings)
    if engine.cache_config.get("enable_prefix_caching") == "False":
        findings.add(
            PREFIX_CACHING_OFF,
            f"{engine.name}: vLLM's own prefix caching is off.",
            "Start it without --no-enable-prefix-caching.",
        )
    for number, tier in enumerate(engine.reading.tiers):
        where = f"{engine.name}: {tier.name}"
        _state(tier, where, findings)
        _stores(engine, tier, where, findings)
        _reads(engine, tier, where, findings, is_primary=number == 0)
        if number:
            _foreign(engine, tier, where, findings)
            _speed(engine, tier, where, findings)
    lost = engine.page.total(OF_PRIMARY["stores_dropped"], **engine.labels)
    if lost:
        findings.add(
            STORES_DROPPED,
            f"{engine.name}: {lost:,.0f} blocks were not stored, as no slot was free.",
            "Raise cpu_bytes_to_use, or lower cascade_slots_fraction_max.",
        )


def _state(tier: TierReading, where: str, findings: Findings) -> None:
    if tier.state != IN_USE:
        findings.add(
            TIER_NOT_IN_USE, f"{where}: {tier.state}.", "Look at the engine's log for this tier."
        )
    for fault, meaning in FAULTS.items():
        if fault in tier.faults:
            findings.add(
                TIER_FAULTS,
                f"{where}: {meaning.about} ({fault}: {tier.faults[fault]:,.0f}).",
                sentence(meaning.remedy),
            )


def _stores(engine: RunningEngine, tier: TierReading, where: str, findings: Findings) -> None:
    dropped = engine.page.total(OF_TIER["cascades_dropped"], **engine.labels, tier=tier.name)
    if dropped:
        findings.add(
            STORES_DROPPED,
            f"{where}: {dropped:,.0f} blocks left host memory before the tier had room for them.",
            "Raise cpu_bytes_to_use, or cascade_slots_fraction_max up to 1.",
        )
    refused = engine.page.total(OF_TIER["cascades_refused"], **engine.labels, tier=tier.name)
    if refused and not tier.written_bytes:
        findings.add(
            STORES_DROPPED,
            f"{where}: its admission has refused all {refused:,.0f} blocks.",
            "Remove admission, or raise its remembered_blocks_max.",
        )


def _reads(
    engine: RunningEngine, tier: TierReading, where: str, findings: Findings, *, is_primary: bool
) -> None:
    labels = {**engine.labels, "tier": tier.name}
    queries = engine.page.total(VLLMS_QUERIES, **labels)
    if not tier.hits and queries >= QUERIES_MIN:
        findings.add(
            NEVER_HIT,
            f"{where}: none of {queries:,.0f} blocks that were looked up was hit."
            f"{_misses(engine, tier)}",
            "See whether prompts repeat at all, and whether a restart or another engine hashes "
            "alike; a tier that is evicted before it is read must be larger, or go.",
        )
    wasted = engine.page.total(OF_SOURCE["wasted_blocks"], **labels)
    if wasted >= WASTED_MIN and wasted >= WASTED_SHARE * tier.hits:
        findings.add(
            EVICTED_UNREAD,
            f"{where}: {wasted:,.0f} of {tier.hits:,.0f} loaded blocks were evicted before a "
            "request read them.",
            "Raise cpu_bytes_to_use.",
        )
    if tier.is_too_small:
        key = "cpu_bytes_to_use" if is_primary else "capacity_bytes"
        findings.add(
            TOO_SMALL,
            f"{where}: it would have hit {tier.hits_if_twice:,.0f} blocks more at twice its size.",
            f"Raise {key}.",
        )


def _misses(engine: RunningEngine, tier: TierReading) -> str:
    """Return why requests missed in a tier, the commonest reasons first, as a sentence."""
    series = engine.page.series(f"{metrics.MISSES.name}_total", **engine.labels, tier=tier.name)
    reasons = sorted(((value, found["reason"]) for found, value in series if value), reverse=True)
    shown = ", ".join(f"{reason} {count:,.0f}" for count, reason in reasons[:3])
    return f" Requests ended there: {shown}." if shown else ""


def _foreign(engine: RunningEngine, tier: TierReading, where: str, findings: Findings) -> None:
    """Find blocks that others have stored, and this engine does not serve."""
    page, labels = engine.page, {**engine.labels, "tier": tier.name}
    unknown = sum(page.total(name, **labels) for name in page.counters("_unauthenticated"))
    if unknown:
        findings.add(
            UNAUTHENTICATED,
            f"{where}: no key of the tier authenticates {unknown:,.0f} blocks.",
            "Give all engines the same keys, those that write before them too; if they have, "
            "check who can write there.",
        )
    other = {
        series.label[-1]: count
        for series in metrics.backend_series("disk", OF_DISK, tier.name)
        if "_other_" in series.attribute
        and (count := page.total(series.metric, **labels, case=series.label[-1]))
    }
    if other:
        cases = ", ".join(f"{case} {count:,.0f}" for case, count in other.items())
        findings.add(
            OTHER_FORMATS,
            f"{where}: at its start it found blocks of another version or configuration ({cases}).",
            "Go back to that version or configuration to use it, or let it be overwritten.",
        )


def _speed(engine: RunningEngine, tier: TierReading, where: str, findings: Findings) -> None:
    labels = {**engine.labels, "tier": tier.name}
    bytes_per_s = engine.page.gauge(metrics.BYTES_PER_SECOND.name, **labels, work=LOADS)
    prefill = engine.prefill_tokens_per_s
    if not bytes_per_s or prefill is None or tier.loaded_tokens < SLOWER_TOKENS_MIN:
        return
    if not tier.read_bytes:
        return
    note_if_slower(bytes_per_s * tier.loaded_tokens / tier.read_bytes, prefill, where, findings)


def note_if_slower(
    loaded_tokens_per_s: float, prefill_tokens_per_s: float, where: str, findings: Findings
) -> None:
    """Note a tier that loads fewer tokens a second than the engine computes."""
    if loaded_tokens_per_s < prefill_tokens_per_s:
        findings.add(
            SLOWER_THAN_PREFILL,
            f"{where}: it loads {loaded_tokens_per_s:,.0f} tokens a second, and the engine "
            f"computes {prefill_tokens_per_s:,.0f}.",
            "Use faster storage or a faster network, or remove the tier.",
        )


def look_at_all(engines: Sequence[RunningEngine], findings: Findings) -> None:
    """Note differences of engines of one model that have a tier in common."""
    for number, engine in enumerate(engines):
        for other in engines[:number]:
            _compare(other, engine, findings)


def _compare(one: RunningEngine, other: RunningEngine, findings: Findings) -> None:
    in_common = [
        tier.name
        for tier in one.reading.tiers[1:]
        if tier.name in {each.name for each in other.reading.tiers[1:]}
    ]
    differing = [
        f"{fact} ({', '.join(values)})"
        for fact in SHARED_FACTS
        if len(values := {each.cache_config.get(fact, ""): 0 for each in (one, other)}) > 1
    ]
    if in_common and differing and one.reading.model == other.reading.model:
        findings.add(
            ENGINES_APART,
            f"{one.name} and {other.name} both have a tier {', '.join(in_common)}, and differ in "
            f"{', '.join(differing)}.",
            "Start both with the same settings, if that tier is one storage.",
        )
    seeded = [each for each in (one, other) if _is_seeded(each)]
    if in_common and len(seeded) == 2:
        findings.add(
            ENGINES_APART,
            f"{one.name} and {other.name} hash with xxhash, which draws a seed for each process "
            "unless PYTHONHASHSEED is set.",
            "Set PYTHONHASHSEED to the same number for both, unless it is, or the algorithm to "
            "sha256.",
        )


def _is_seeded(engine: RunningEngine) -> bool:
    return engine.cache_config.get("prefix_caching_hash_algo", "").startswith("xxhash")
