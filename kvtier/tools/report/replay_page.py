"""The page of a replay through the runtime, as ``kvtier replay --json`` writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvtier.tools.replay import report_tables
from kvtier.tools.replay.report import problems_in
from kvtier.tools.report.axis import BINS_MAX, elapsed_axis, lasted
from kvtier.tools.report.page import REST, PageTable, Panel, ReportPage, Series, percent, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class _Tier(msgspec.Struct):
    name: str
    hit_blocks: int
    hit_tokens: int


class _Requests(msgspec.Struct):
    first_tokens: int
    input_tokens: int
    gpu_tokens: int
    computed_tokens: int


class _PlayedTrace(msgspec.Struct):
    name: str
    seconds: float


class _Summary(msgspec.Struct):
    count: int
    mean: float | None


class _FirstToken(msgspec.Struct):
    with_kvtier: _Summary
    without: _Summary


class _Interval(msgspec.Struct):
    from_s: float
    requests: int
    referenced_blocks: int
    hit_blocks: list[int]
    resident_blocks: list[int] | None
    first_token_p50_s: float | None
    first_token_p99_s: float | None


class Replay(msgspec.Struct):
    """Parts of a report that the page itself reads; its tables are the command's."""

    partial: bool
    warnings: list[str]
    trace: _PlayedTrace
    requests: _Requests
    tiers: list[_Tier]
    first_token_s: _FirstToken
    interval_s: float
    over_time: list[_Interval]


def replay_page(figures: Mapping[str, Any], source: str) -> ReportPage:
    """Return the page of a report. Raises ``ValueError`` or ``KeyError`` if a part is missing."""
    replay = msgspec.convert(figures, Replay)
    problems = problems_in(figures)
    bins, bin_s = _bins(replay)
    return ReportPage(
        title=f"kvtier replay: {replay.trace.name}",
        summary=_summary(replay, problems),
        axis=elapsed_axis(bin_s * len(bins), len(bins)) if bins else None,
        panels=_panels(replay, bins, bin_s),
        tables=[
            PageTable(each.title, each.columns, [[*map(str, row)] for row in each.rows])
            for each in report_tables.tables(figures)
        ],
        source=source,
        verdict="failed" if problems else "warned" if replay.warnings else "passed",
        failure="\n".join(problems),
    )


def _bins(replay: Replay) -> tuple[list[list[_Interval]], float]:
    """Return the intervals of each bin, one or several, and the length of a bin."""
    last = max((each.from_s for each in replay.over_time), default=-1.0)
    if last < 0 or replay.interval_s <= 0:
        return [], 0.0
    count = round(last / replay.interval_s) + 1
    each_has = -(-count // BINS_MAX)
    bins: list[list[_Interval]] = [[] for _ in range(-(-count // each_has))]
    for interval in replay.over_time:
        bins[max(0, round(interval.from_s / replay.interval_s)) // each_has].append(interval)
    return bins, replay.interval_s * each_has


def _summary(replay: Replay, problems: Sequence[str]) -> list[str]:
    requests = replay.requests
    tokens = requests.input_tokens or 1
    hit_tokens = sum(tier.hit_tokens for tier in replay.tiers)
    tiers = ", ".join(f"{tier.name} {percent(tier.hit_tokens / tokens)}" for tier in replay.tiers)
    gpu = ""
    if requests.gpu_tokens:
        gpu = f", and {percent(requests.gpu_tokens / tokens)} were in the GPU's prefix cache"
    found = []
    found.append(
        f"{percent(hit_tokens / tokens)} of the prompt tokens were loaded from kvtier's tiers "
        f"({tiers}){gpu}."
    )
    prompts = f"{requests.first_tokens:,} requests with {requests.input_tokens:,} prompt tokens"
    found.append(f"{prompts} were replayed.")
    ours, without = replay.first_token_s.with_kvtier, replay.first_token_s.without
    if ours.mean is not None and without.mean is not None:
        saved_s = (without.mean - ours.mean) * ours.count
        word = "earlier" if saved_s >= 0 else "later"
        found.append(
            f"The first token came after {lasted(ours.mean)} on average, without kvtier after "
            f"{lasted(without.mean)}: all requests together had it {lasted(abs(saved_s))} {word}."
        )
    if replay.partial:
        found.append("The run was stopped before the end of the trace.")
    return [*(["FAILED"] if problems else []), *found, *replay.warnings]


def _panels(replay: Replay, bins: Sequence[Sequence[_Interval]], bin_s: float) -> list[Panel]:
    referenced = [sum(each.referenced_blocks for each in one) for one in bins]

    def hits(tier: int) -> list[float | None]:
        return [
            sum(each.hit_blocks[tier] for each in one) / asked if asked else None
            for one, asked in zip(bins, referenced, strict=True)
        ]

    def resident(tier: int) -> list[float | None]:
        known = [[each.resident_blocks for each in one if each.resident_blocks] for one in bins]
        return [float(one[-1][tier]) if one else None for one in known]

    def slowest(values: Sequence[Sequence[float | None]]) -> list[float | None]:
        return [max((each for each in one if each is not None), default=None) for one in values]

    tiers = [tier.name for tier in replay.tiers]
    rate: list[float | None] = [sum(each.requests for each in one) / bin_s for one in bins]
    half = slowest([[each.first_token_p50_s for each in one] for one in bins])
    most = slowest([[each.first_token_p99_s for each in one] for one in bins])
    missed = [
        None if not asked else 1 - sum(sum(each.hit_blocks) for each in one) / asked
        for one, asked in zip(bins, referenced, strict=True)
    ]
    others = "computed, or on the GPU" if replay.requests.gpu_tokens else "computed"
    return [
        Panel(
            "Where prompts' blocks came from",
            f"of the requested blocks; a point is {lasted(bin_s)}",
            [
                *(Series(name, hits(at)) for at, name in enumerate(tiers)),
                Series(others, missed, REST),
            ],
            "stack",
            top=1.0,
            shown=percent,
        ),
        Panel("Requests", "first tokens a second", [Series("", rate)]),
        Panel(
            "Time to first token",
            "with kvtier",
            [Series("p50", half), Series("p99", most)],
            shown=lasted,
        ),
        Panel(
            "Residency",
            "blocks that a tier holds",
            [Series(name, resident(at)) for at, name in enumerate(tiers)],
            shown=whole,
        ),
    ]
