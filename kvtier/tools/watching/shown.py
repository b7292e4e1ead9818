"""Shows readings: a line for each engine, a table of its tiers, and advice."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

from kvtier.tools.watching.readings import FAULTS, IN_USE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier.core.metrics import TierFault
    from kvtier.tools.watching.readings import EngineReading, TierReading

NOTHING: Final = "-"
ALL_WELL: Final = "All tiers are in use, and nothing is wrong."
DAY_S: Final = 86_400.0
AGE_S_MIN: Final = 600.0
"""Age of an engine from which its writes per day are shown."""

RECENT_S: Final = 3600.0
"""Age of a fault up to which it is worth advice."""

WORN_A_DAY: Final = 3.0
"""More drive writes a day than this wear most drives out within their warranty."""


def headline(engine: EngineReading) -> str:
    """Return a line about the whole engine."""
    return (
        f"{engine.url}, engine {engine.engine}: {engine.model}\n"
        f"kvtier {engine.version} in vLLM {engine.vllm}, {span(engine.age_s)} old; "
        f"{span(engine.prefill_saved_s)} of prefill saved"
    )


def table_of(
    engine: EngineReading, windows: Sequence[tuple[str, EngineReading]]
) -> tuple[list[str], list[list[str]]]:
    """Return columns, and a row for each tier: at most 64 characters beside the tiers' names.

    ``windows``: titles, and the engine's work since each began. The last one also applies to bytes
    and seconds.
    """
    titles = (title for title, _ in windows)
    columns = ["tier", "state", "used", *titles, "in", "out", "p50", "p99", "a day"]
    _, last = windows[-1]
    return columns, [
        [
            tier.name,
            _in_a_word(tier.state),
            _used(tier),
            *(number(window.tiers[n].loaded_tokens) for _, window in windows),
            size(last.tiers[n].read_bytes),
            size(last.tiers[n].written_bytes),
            *(_seconds(last.tiers[n].load_seconds.quantile(share)) for share in (0.5, 0.99)),
            _written_a_day(engine, tier),
        ]
        for n, tier in enumerate(engine.tiers)
    ]


def faults_of(engine: EngineReading) -> Iterator[str]:
    """Yield a line for each tier that is not in use or has had faults, with counts and ages."""
    for tier in engine.tiers:
        state = [] if tier.state == IN_USE else [tier.state]
        kinds = [
            f"{name} {count:,.0f}, the last {span(_ago_s(engine, tier, name))} ago"
            for name, count in tier.faults.items()
        ]
        if state or kinds:
            yield f"{tier.name}: {'; '.join(state + kinds)}"


def advice(engine: EngineReading) -> str:
    """Return one sentence: what to do first."""
    wrong = chain(_unused(engine), _wrong(engine))
    return next(chain(wrong, _worn(engine), _small(engine), _idle(engine)), ALL_WELL)


def _unused(engine: EngineReading) -> Iterator[str]:
    for tier in engine.tiers:
        if tier.state != IN_USE:
            yield f"{tier.name} is not in use, and the engine goes on without: look at its log."


def _wrong(engine: EngineReading) -> Iterator[str]:
    for name, meaning in FAULTS.items():
        for tier in engine.tiers:
            if name in tier.faults and _ago_s(engine, tier, name) < RECENT_S:
                yield f"{tier.name} is in use, and {meaning.about}: {meaning.remedy} ({name})."


def _ago_s(engine: EngineReading, tier: TierReading, fault: TierFault) -> float:
    """Return the seconds since it was last counted: 0 until the engine reports the time."""
    return max(0.0, engine.at_s - tier.last_faults.get(fault, engine.at_s))


def _worn(engine: EngineReading) -> Iterator[str]:
    for tier in engine.tiers:
        writes = drive_writes_a_day(engine, tier)
        if writes is not None and writes > WORN_A_DAY:
            yield (
                f"{tier.name} writes its capacity {writes:.1f} times a day, which wears a drive "
                'out: set "admission": "second_touch".'
            )


def _small(engine: EngineReading) -> Iterator[str]:
    for tier in engine.tiers:
        if tier.is_too_small:
            key = "cpu_bytes_to_use" if tier is engine.tiers[0] else "capacity_bytes"
            yield (
                f"{tier.name} would have hit {tier.hits_if_twice:,.0f} blocks more at twice its "
                f"size: raise {key}."
            )


def _idle(engine: EngineReading) -> Iterator[str]:
    if not any(tier.loaded_tokens for tier in engine.tiers):
        yield "No request has loaded anything yet: see the page Is it helping?"


def drive_writes_a_day(engine: EngineReading, tier: TierReading) -> float | None:
    """Return how many times a day the tier's capacity is written; None if not known."""
    if not tier.capacity_bytes or engine.age_s < AGE_S_MIN or tier.drive_bytes is None:
        return None
    return tier.drive_bytes / engine.age_s * DAY_S / tier.capacity_bytes


def _written_a_day(engine: EngineReading, tier: TierReading) -> str:
    writes = drive_writes_a_day(engine, tier)
    return NOTHING if writes is None else f"{writes:.2g} x"


def _in_a_word(state: str) -> str:
    """Return a state, shortened to fit the table."""
    worst = state.partition(", ")[0]
    return {"no": "bypassed", "trying": "trying"}.get(worst.partition(" ")[0], worst)


def _used(tier: TierReading) -> str:
    if tier.used_bytes is None:
        return NOTHING
    if not tier.capacity_bytes:
        return size(tier.used_bytes)
    return f"{tier.used_bytes / tier.capacity_bytes:.0%}"


def size(count: float) -> str:
    """Return bytes in a unit that fits; a digit behind the point if there is one before it."""
    power = _power(count)
    value = count / 1000**power
    shown = f"{value:.1f}" if power and value < 9.95 else f"{value:.0f}"
    return f"{shown} {' kMGTP'[power].strip()}B" if count else NOTHING


def number(count: float) -> str:
    """Return a number with three digits, or all if there are not more than four."""
    if count < 10_000:
        return f"{count:.0f}"
    power = _power(count)
    return f"{count / 1000**power:.3g}{' kMGTP'[power]}"


def _power(count: float) -> int:
    """Return the power of 1000 in which a number has up to three digits before the point."""
    return min(len(f"{float(f'{count:.3g}'):.0f}") - 1, 17) // 3


def sentence(clause: str) -> str:
    """Return a clause as a sentence of its own."""
    return f"{clause[:1].upper()}{clause[1:]}."


def span(seconds: float) -> str:
    """Return a time in a unit that fits."""
    for unit, length in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    unit, value = ("s", seconds) if seconds >= 0.9995 else ("ms", 1e3 * seconds)
    return f"{value:.{0 if value >= 9.95 else 1}f} {unit}"
