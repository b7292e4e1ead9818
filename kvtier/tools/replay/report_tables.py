"""A replay's report as tables: each with title, columns and rows, made from the JSON mapping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.plugin_api.sizes import shown_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SHOWN: Final = ("mean", "p50", "p90", "p99")
"""Of a time to first token."""

TIER_FAULTS: Final = (
    "stores_deferred",
    "cascades_dropped",
    "promotions_dropped",
    "damaged",
    "failed",
    "stores_rejected",
    "jobs_timed_out",
    "probes_timed_out",
    "breaker_opened",
)
"""Counters of a secondary tier that are shown if they are not 0."""


ALL_HITS: Final = "all hits"
ON_GPU: Final = "in the GPU's prefix cache"
COMPUTED: Final = "computed"


class Table(NamedTuple):
    """Arguments of ``kvtier.tools.terminal.table``."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


def tables(report: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a report for readers, in order."""
    return [_hits(report), _moves(report), _operations(report), _first_token(report), _sum(report)]


def _hits(report: Mapping[str, Any]) -> Table:
    requests = report["requests"]
    tiers = report["tiers"]
    found = [
        (tier["name"], tier["hit_blocks"], tier["hit_ratio"], tier["hit_tokens"]) for tier in tiers
    ]
    hit_tokens = sum(tier["hit_tokens"] for tier in tiers)
    found.append((ALL_HITS, requests["hit_blocks"], requests["hit_ratio"], hit_tokens))
    on_gpu = requests["gpu_blocks"], requests["gpu_tokens"]
    whole = max(1, requests["referenced_blocks"])
    if on_gpu[1] or report["recorded"]:
        found.append((ON_GPU, on_gpu[0], on_gpu[0] / whole, on_gpu[1]))
    missed = requests["referenced_blocks"] - requests["hit_blocks"] - on_gpu[0]
    found.append((COMPUTED, missed, missed / whole, requests["computed_tokens"]))
    rows = [
        [name, f"{blocks:,}", f"{ratio:.4f}", f"{tokens:,}"]
        for name, blocks, ratio, tokens in found
    ]
    columns = ["", "blocks", "share", "tokens"]
    if report["recorded"]:
        columns.append("recorded tokens")
        recorded = _recorded(report["recorded"])
        for row in rows:
            row.append(f"{recorded.get(row[0], 0):,}")
    return Table("Where the prompts' blocks came from", columns, rows)


def _recorded(recorded: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens that the recorded engine found, by the names of the rows."""
    return {
        **recorded["loaded_tokens"],
        ALL_HITS: sum(recorded["loaded_tokens"].values()),
        ON_GPU: recorded["gpu_tokens"],
        COMPUTED: recorded["computed_tokens"],
    }


def _moves(report: Mapping[str, Any]) -> Table:
    primary = report["tiers"][0]["name"]
    gpu = report["gpu"]
    rows: list[Sequence[object]] = [
        (f"GPU > {primary}", shown_bytes(gpu["stored_bytes"]), "", "", "", ""),
        (f"{primary} > GPU", shown_bytes(gpu["loaded_bytes"]), "", "", "", ""),
    ]
    for tier in report["tiers"][1:]:
        for label, moved, took in (
            (f"{primary} > {tier['name']}", tier["cascaded"], tier["cascade_s"]),
            (f"{tier['name']} > {primary}", tier["promoted"], tier["promotion_s"]),
        ):
            rate = moved["bytes_per_busy_s"]
            rows.append(
                (
                    label,
                    shown_bytes(moved["bytes"]),
                    f"{moved['busy_s']:.1f}",
                    "-" if rate is None else f"{shown_bytes(rate)}/s",
                    _milliseconds(took["p50"]),
                    _milliseconds(took["p99"]),
                )
            )
    columns = ("", "moved", "busy s", "speed", "p50 ms", "p99 ms")
    return Table("Bytes moved; times of a cascaded block, of a promotion job", columns, rows)


def _operations(report: Mapping[str, Any]) -> Table:
    calls = {
        **report["operations_s"],
        **{f"probe of {tier['name']}": tier["probe_s"] for tier in report["tiers"][1:]},
        "own calls of a request": report["scheduler_s"]["own_calls"],
    }
    rows = [
        (name, f"{each['count']:,}", _microseconds(each["p50"]), _microseconds(each["p99"]))
        for name, each in calls.items()
    ]
    columns = ("", "calls", "p50 µs", "p99 µs")
    return Table("Calls, time per key (lookups: a sample)", columns, rows)


def _first_token(report: Mapping[str, Any]) -> Table:
    names = {
        "with_kvtier": "with kvtier",
        "without": "without",
        "of_which_entering": "with: until entering",
        "of_which_waiting_for_tiers": "with: waiting for tiers",
    }
    rows = [
        (name, *(_milliseconds(report["first_token_s"][key][which]) for which in _SHOWN))
        for key, name in names.items()
    ]
    return Table("Time to first token, ms: computing stated, tiers real", ("", *_SHOWN), rows)


def _sum(report: Mapping[str, Any]) -> Table:
    time_s = report["time_s"]
    tiers = report["tiers"]
    rows: list[Sequence[object]] = [
        ("requests with a first token", f"{report['requests']['first_tokens']:,}"),
        ("real time", f"{time_s['real']:.1f} s, {time_s['replayed']:,.1f} s on the replay's clock"),
        ("scheduler thread per request", f"{report['scheduler_s']['per_request'] * 1e6:.0f} µs"),
        ("peak memory", f"{report['peak_memory_bytes'] / 2**20:.0f} MiB"),
        ("evicted", ", ".join(f"{tier['name']}: {tier['evicted_blocks']:,}" for tier in tiers)),
        ("stores without room, tried again", f"{tiers[0]['stores_refused']:,}"),
        ("blocks not stored for want of room", f"{tiers[0]['counts']['stores_dropped']:,}"),
        ("promotions refused for want of room", f"{tiers[0]['counts']['promotions_refused']:,}"),
    ]
    for tier in tiers[1:]:
        faults = [
            f"{name} {tier['counts'][name]:,}" for name in TIER_FAULTS if tier["counts"][name]
        ]
        rows.append((f"faults of {tier['name']}", ", ".join(faults) or "none"))
    loaded, checked = report["gpu"]["loaded_blocks"], report["gpu"]["checked_blocks"]
    rows.append(
        ("blocks read, and compared", f"{loaded:,}, {checked:,} ({report['settings']['verify']})")
    )
    rows.append(("wrong blocks", f"{report['wrong_blocks']:,}"))
    return Table("The run", ("", "value"), rows)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f}"


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:,.2f}"
