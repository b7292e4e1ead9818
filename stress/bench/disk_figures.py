"""What legs say: medians, percentiles, and the ratios that are held against a bar."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.tools.bench.call_legs import KINDS, LOAD, STORE
from kvtier.tools.bench.percentile import percentile
from kvtier.tools.terminal import table
from stress.bench.disk_fio import FIO
from stress.bench.disk_lmcache import LMCACHE
from stress.bench.disk_sides import ENCRYPTED, KVTIER_FS, RAW
from stress.bench.harness import spread, yes_or_no
from stress.bench.sides import KVTIER, VLLM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stress.bench.disk_legs import DiskLeg

Legs = dict[str, dict[str, "list[DiskLeg]"]]  #: by kind, then by side: one a round

BESIDE_VLLM_MIN: Final = {
    (64 << 10, STORE): 4.0,
    (64 << 10, LOAD): 1.2,
    (1 << 20, STORE): 1.5,
    (1 << 20, LOAD): 1.0,
}
"""How many times vLLM's GB/s is promised, by block size and kind."""

BESIDE_FIO_MIN: Final = 0.85
LARGE_BYTES: Final = 1 << 20  #: blocks of the models that people serve have this size and more
FS_BESIDE_VLLM_MIN: Final = 1.0  #: of large blocks
OF_BEST_MIN: Final = 0.95  #: of large blocks
PAUSE_BESIDE_VLLM_MAX: Final = 0.25
RIVALS: Final = {VLLM: "vLLM's", LMCACHE: "LMCache's", RAW: "raw's"}
BEST: Final = "best"  #: of the rivals, in each round

ROWS: Final = (
    ("GB/s", "gb_per_s", 2),
    ("job p50, ms", "job_p50_ms", 1),
    ("job p99, ms", "job_p99_ms", 1),
    ("CPU s a GB", "cpu_s_per_gb", 2),
    ("GB/s, thread busy", "gb_per_s_busy", 2),
    ("longest pause, ms", "longest_pause_ms", 1),
)
SHOWN_AS: Final = {VLLM: "vLLM fs", KVTIER: "kvtier disk", LMCACHE: "LMCache raw_block"}
NOTHING: Final = "-"


class DiskRounds(NamedTuple):
    """The legs of one block size, with the thread idle and busy."""

    idle: Legs
    busy: Legs
    pauses_without_io_s: list[float]


def figures(rounds: DiskRounds, leg_bytes: int, block_bytes: int) -> dict[str, Any]:
    """Return all figures of one block size, by kind and side: one a round, or one of all jobs."""

    def each(legs: Legs, figure: Callable[[list[DiskLeg]], Any]) -> dict[str, dict[str, Any]]:
        return {kind: {side: figure(legs[kind][side]) for side in legs[kind]} for kind in KINDS}

    def gb_per_s(legs: list[DiskLeg]) -> list[float]:
        return [leg_bytes / leg.seconds / 1e9 for leg in legs]

    def job_ms(legs: list[DiskLeg], percent: float) -> float | None:
        seconds = [s for leg in legs for s in leg.job_seconds]
        return percentile(seconds, percent) * 1e3 if seconds else None

    def cpu_s_per_gb(legs: list[DiskLeg]) -> list[float] | None:
        known = [leg.cpu_seconds for leg in legs if leg.cpu_seconds is not None]
        return [seconds / leg_bytes * 1e9 for seconds in known] or None

    return {
        "gb_per_s": each(rounds.idle, gb_per_s),
        "gb_per_s_busy": each(rounds.busy, gb_per_s),
        "job_p50_ms": each(rounds.idle, lambda legs: job_ms(legs, 50)),
        "job_p99_ms": each(rounds.idle, lambda legs: job_ms(legs, 99)),
        "cpu_s_per_gb": each(rounds.idle, cpu_s_per_gb),
        "longest_pause_ms": each(
            rounds.busy, lambda legs: [leg.longest_pause_s * 1e3 for leg in legs]
        ),
        "longest_pause_without_io_ms": [pause * 1e3 for pause in rounds.pauses_without_io_s],
        "ratios": ratios(rounds, block_bytes),
    }


def ratios(rounds: DiskRounds, block_bytes: int) -> list[dict[str, Any]]:
    """Return all that is promised of a block size, and what belongs beside it.

    Each is one side's figure over another's, round by round.
    """
    found = []
    is_large = block_bytes >= LARGE_BYTES
    for kind in KINDS:
        idle, busy = (
            {side: [leg.seconds for leg in each] for side, each in legs[kind].items()}
            for legs in (rounds.idle, rounds.busy)
        )
        rivals = [side for side in RIVALS if side in idle]
        best = f"share of the best of {' and '.join(RIVALS[side] for side in rivals)} GB/s"
        if is_large:
            idle[BEST] = [min(each) for each in zip(*(idle[s] for s in rivals), strict=True)]
        on_vllm = BESIDE_VLLM_MIN.get((block_bytes, kind))
        on_raw = None if FIO in idle else BESIDE_FIO_MIN
        fs_on_vllm = FS_BESIDE_VLLM_MIN if is_large else None
        found += [
            _ratio(f"{kind}, {name}", seconds[other], seconds[side], at_least=bar)
            for name, seconds, side, other, bar in (
                ("times vLLM's GB/s", idle, KVTIER, VLLM, on_vllm),
                ("thread busy, times vLLM's GB/s", busy, KVTIER, VLLM, None),
                ("share of raw's GB/s", idle, KVTIER, RAW, on_raw),
                ("share of fio's GB/s", idle, KVTIER, FIO, BESIDE_FIO_MIN),
                ("encrypted, share of kvtier's own GB/s", idle, ENCRYPTED, KVTIER, None),
                ("kvtier fs, times vLLM's GB/s", idle, KVTIER_FS, VLLM, fs_on_vllm),
                ("times LMCache's GB/s", idle, KVTIER, LMCACHE, None),
                (best, idle, KVTIER, BEST, OF_BEST_MIN),
            )
            if side in seconds and other in seconds
        ]
    for kind in KINDS:
        ours, theirs = (
            [leg.longest_pause_s for leg in rounds.busy[kind][side]] for side in (KVTIER, VLLM)
        )
        name = f"{kind}, longest pause, share of vLLM's"
        found.append(_ratio(name, ours, theirs, at_most=PAUSE_BESIDE_VLLM_MAX))
    return found


def _ratio(
    name: str,
    over: Sequence[float],
    under: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> dict[str, Any]:
    of_rounds = [one / other for one, other in zip(over, under, strict=True)]
    median = statistics.median(of_rounds)
    holds = None
    if at_least is not None:
        holds = median >= at_least
    elif at_most is not None:
        holds = median <= at_most
    return {
        "name": name,
        "median": median,
        "of_rounds": of_rounds,
        "at_least": at_least,
        "at_most": at_most,
        "holds": holds,
    }


def show_figures(size: dict[str, Any], rounds: int, threads: int) -> None:
    """Print the figures of one block size."""
    sides = list(size["gb_per_s"][STORE])
    rows = [
        [f"{kind}, {name}", *(_cell(size[key][kind].get(side), digits) for side in sides)]
        for kind in KINDS
        for name, key, digits in ROWS
    ]
    columns = ["", *(SHOWN_AS.get(side, side) for side in sides)]
    table(f"{shown_size(size['block_bytes'])} blocks", columns, rows)
    buffered = [side for side, is_direct in size["direct"].items() if not is_direct]
    notes = [
        ["jobs", f"{size['job_blocks']} blocks each, {size['jobs_in_flight']} at once"],
        ["threads of each side", f"{threads}"],
        ["bytes of a leg", f"{shown_size(size['leg_bytes'])}, medians of {rounds} rounds"],
        [
            "longest pause of the same busy thread without I/O, ms",
            _cell(size["longest_pause_without_io_ms"], 1),
        ],
        ["opened with O_DIRECT", f"all but {', '.join(buffered)}" if buffered else "all"],
        ["fio", size["fio"]],
    ]
    table("", ["", ""], notes)


def show_ratios(sizes: Sequence[dict[str, Any]]) -> None:
    """Print the ratios of all block sizes, and their bars."""
    rows = [
        [
            f"{shown_size(size['block_bytes'])}: {ratio['name']}",
            f"{ratio['median']:.2f}",
            spread(ratio["of_rounds"], 2),
            _bar(ratio),
            yes_or_no(ratio["holds"]),
        ]
        for size in sizes
        for ratio in size["ratios"]
    ]
    table("kvtier disk", ["", "ratio", "of rounds", "bar", "holds"], rows)


def _cell(values: list[float] | float | None, digits: int) -> str:
    """Show a figure, or the median of one a round."""
    if values is None:
        return NOTHING
    value = statistics.median(values) if isinstance(values, list) else values
    return f"{value:,.{digits}f}"


def _bar(ratio: dict[str, Any]) -> str:
    if ratio["at_least"] is not None:
        return f">= {ratio['at_least']:.2f}"
    return "" if ratio["at_most"] is None else f"<= {ratio['at_most']:.2f}"


def shown_size(count: int) -> str:
    """Write a size as people do, without rounding it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} bytes"
