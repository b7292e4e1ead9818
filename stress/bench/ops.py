"""``stress.bench ops``: what each call costs the scheduler thread, both managers in one process.

Requests alternate between the sides, and who goes first alternates too, so
that a noisy machine and a warm cache favour neither. A run builds both
managers anew, fills them, loads what they hold, and stores as much again,
which evicts. The ratio of each call is one of medians from the same run.
"""

from __future__ import annotations

import gc
import random
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.utils.gc_utils import freeze_gc_heap

from kvtier.errors import Misuse
from kvtier.settings.plugins import make_policy
from kvtier.tools.bench.percentile import percentile
from kvtier.tools.held_signals import HeldSignals
from kvtier.tools.terminal import progress, table
from stress.bench.children import run_child
from stress.bench.harness import (
    RUNS,
    SEED,
    Option,
    Report,
    orders,
    own_folder,
    ratio,
    spread,
    yes_or_no,
)
from stress.bench.picture import check_can_draw, draw_scale
from stress.bench.sides import KVTIER, SIDES, VLLM, ManagerSide, Setup, vllm_policy_beside
from stress.bench.turns import Call, PauseWatch, RequestPlayer, Stopwatch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping, Sequence

OPTIONS: Final = (
    Option("--blocks", 20_000, "blocks that are resident"),
    Option("--request-blocks", 512, "blocks in each request"),
    Option("--policies", "lru", "eviction policies of kvtier to measure, e.g. lru,reuse"),
    RUNS,
    Option(
        "--secondary-tiers",
        0,
        "1 gives both sides an fs tier, which is idle while calls are timed",
        least=0,
        choices=(0, 1),
    ),
    Option(
        "--scale",
        None,
        "measure the cost of a key at each number of resident blocks: 1e3,1e4,1e5,1e6",
    ),
    Option("--picture", None, "plot what --scale measures to this file, as PNG"),
)

BLOCK_BYTES: Final = 4096
"""Of each slot. No byte of it is touched without a tier; a tier's files want whole pages."""

SCALE_REQUEST_BLOCKS: Final = 128  #: the same at every size, and a tenth of the smallest
SCALE_SAMPLES: Final = 150
BLOCK_BYTES_MAX: Final = 400  #: of memory for each resident block, everything included
GC_PAUSE_MS_MAX: Final = 5.0
WARM_UP_REQUESTS: Final = 8
PROBED_REQUESTS: Final = 12


@dataclass(frozen=True)
class OpsOptions:
    """What is to be measured. Blocks are rounded down to whole requests, one at least."""

    blocks: int
    request_blocks: int
    runs: int
    with_tier: bool = False
    samples: int | None = None  #: requests of each kind whose calls are timed; None: all that fit

    @property
    def requests(self) -> int:
        """How many requests fill the primary tier."""
        return max(1, self.blocks // self.request_blocks)


Watches = dict[str, Stopwatch]


def measure(asked: argparse.Namespace, report: Report) -> None:
    """Measure calls, then calls at each size, then memory and pauses."""
    policies, sizes = _policies(asked.policies), _sizes(asked.scale)
    if asked.picture:
        if not sizes:
            raise Misuse("--picture draws what --scale measures: give both.")
        check_can_draw(asked.picture)
    request_blocks = min(asked.request_blocks, asked.blocks)
    options = OpsOptions(asked.blocks, request_blocks, asked.runs, bool(asked.secondary_tiers))
    at_sizes = [
        OpsOptions(size, min(SCALE_REQUEST_BLOCKS, size), asked.runs, samples=SCALE_SAMPLES)
        for size in sizes
    ]
    report |= {"policies": [], "scale": [], "memory": []}
    for key, each in [("policies", options), *(("scale", at_size) for at_size in at_sizes)]:
        for policy in policies:
            with progress(f"calls at {each.blocks:,} blocks, {policy}", each.runs + 1) as shown:
                report[key].append(measure_policy(each, policy, shown.advance))
    most = max([*sizes, asked.blocks])
    report["memory"] += [_weigh(policy, most, request_blocks) for policy in policies]
    if asked.picture:
        draw_scale(report["scale"], asked.picture)


def show(report: Report) -> None:
    """Print the tables."""
    show_calls(report["policies"], report["options"]["runs"])
    show_scale(report["scale"])
    show_memory(report["memory"], BLOCK_BYTES_MAX, GC_PAUSE_MS_MAX)


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise Misuse("--policies names none. Give one at least, e.g. lru.")
    for name in names:
        make_policy(name, 1)  # an unknown one is refused before the first run
    return names


def _sizes(text: str | None) -> list[int]:
    try:
        sizes = [int(float(word)) for word in (text or "").split(",") if word.strip()]
    except (ValueError, OverflowError):
        raise Misuse(f"--scale {text!r} must be numbers of blocks: 1e3,1e4,1e5,1e6.") from None
    if any(size < 1 for size in sizes):
        raise Misuse(f"--scale {text!r}: every number must be at least 1.")
    return sizes


def measure_policy(
    options: OpsOptions, policy: str, on_run: Callable[[], object]
) -> dict[str, Any]:
    """Return all figures of one policy. ``on_run`` is called after each run and the warm-up."""
    _play(replace(options, blocks=WARM_UP_REQUESTS * options.request_blocks), policy)
    on_run()
    runs = []
    for _ in range(options.runs):
        runs.append(_play(options, policy))
        on_run()
    return {
        "policy": policy,
        "vllm_policy": vllm_policy_beside(policy),
        "blocks": options.requests * options.request_blocks,
        "calls": {name: figures(name, runs) for name in Call if runs[0][KVTIER].ns[name]},
    }


def figures(name: Call, runs: Sequence[Watches]) -> dict[str, Any]:
    """Return one call's figures: medians of the runs' medians, and the ratios."""
    medians = {side: [statistics.median(run[side].ns[name]) for run in runs] for side in SIDES}
    compared = ratio(medians[KVTIER], medians[VLLM])
    return {
        "unit": name.unit,
        **{
            side: {
                "median_ns": statistics.median(medians[side]),
                "p99_ns": percentile([value for run in runs for value in run[side].ns[name]], 99),
            }
            for side in SIDES
        },
        **compared,
        "bound": name.bound,
        "holds": None if name.bound is None else compared["ratio"] <= name.bound,
    }


def _weigh(policy: str, blocks: int, request_blocks: int) -> dict[str, Any]:
    """Return each side's memory and pauses, measured in a process of its own."""
    job = {"policy": policy, "blocks": blocks, "request_blocks": request_blocks}
    weighed: dict[str, Any] = {"policy": policy}
    with progress(f"memory and pauses at {blocks:,} blocks, {policy}", len(SIDES)) as shown:
        for side in SIDES:
            weighed[side] = run_child(__name__, {**job, "side": side}, {})
            shown.advance()
    ours = weighed[KVTIER]
    weighed["bytes_hold"] = ours["traced_bytes_per_block"] <= BLOCK_BYTES_MAX
    weighed["gc_holds"] = ours["gc_longest_ms"] <= GC_PAUSE_MS_MAX
    return weighed


def _play(options: OpsOptions, policy: str) -> Watches:
    """Play one run on fresh managers and return what each side's calls took.

    Ctrl-C interrupts it between two requests: managers take locks inside.
    """
    watches = {name: Stopwatch() for name in SIDES}
    with own_folder() as folder, HeldSignals() as signals:
        if not options.with_tier:  # there are no lookups that ask a tier: they get one of their own
            few = replace(options, blocks=options.request_blocks)
            probes = {name: Stopwatch() for name in SIDES}
            asks = [(RequestPlayer.ask, number) for number in range(PROBED_REQUESTS)]
            _play_requests(few, policy, folder, probes, signals, asks)
            for name in SIDES:
                for call in (Call.LOOKUP_ASKED, Call.LOOKUP_PROBING):
                    watches[name].take_over(call, probes[name])
        place = folder if options.with_tier else None
        _play_requests(options, policy, place, watches, signals, _requests(options))
    return watches


Play = Callable[[RequestPlayer, int, int], None]


def _requests(options: OpsOptions) -> Iterator[tuple[Play, int]]:
    """Yield how each request is played, and its number: fill, load what is there, evict."""
    stored = options.requests
    samples = options.samples or stored
    for number in range(stored):
        yield RequestPlayer.fill if number < stored - samples else RequestPlayer.store, number
    for number in random.Random(SEED).choices(range(stored), k=samples):
        yield RequestPlayer.load_and_decode, number
    for number in range(stored, stored + samples):
        yield partial(RequestPlayer.store, evicting=True), number


def _play_requests(
    options: OpsOptions,
    policy: str,
    tier_folder: Path | None,
    watches: Watches,
    signals: HeldSignals,
    requests: Iterable[tuple[Play, int]],
) -> None:
    count = options.request_blocks
    setup = Setup(options.requests * count, BLOCK_BYTES, policy, tier_folder)
    sides: list[ManagerSide] = []
    try:
        sides.extend(ManagerSide(name, setup) for name in SIDES)
        gc.freeze()  # as vLLM's engine core does when it has started; the last run has collected
        turns = orders([RequestPlayer(side, watches[side.name]) for side in sides])
        for play, number in requests:
            for player in next(turns):
                play(player, number * count, count)
                signals.check()
    finally:
        close_all(sides)


def close_all(sides: list[ManagerSide]) -> None:
    """Close them, and leave nothing of them to the garbage collector."""
    for side in sides:
        side.close()
    sides.clear()
    gc.unfreeze()
    gc.collect()


# --- The tables of ``stress.bench ops``.


LRU_FACTOR_MAX: Final = 2.0
"""A policy may cost this many times what lru does."""


def show_calls(policies: Sequence[dict[str, Any]], runs: int) -> None:
    """Print what each call costs, by policy; beside the first one, those after it."""
    for figures in policies:
        columns = ["ns a key", "vLLM", "p99", "kvtier", "p99", "ratio", "of runs", "bound", "holds"]
        rows = [
            [
                name if call["unit"] == "ns/key" else f"{name} (a call)",
                *(f"{call[side][key]:,.0f}" for side in SIDES for key in ("median_ns", "p99_ns")),
                f"{call['ratio']:.2f}",
                spread([call["ratio_min"], call["ratio_max"]], 2),
                "" if call["bound"] is None else f"{call['bound']:.2f}",
                yes_or_no(call["holds"]),
            ]
            for name, call in figures["calls"].items()
        ]
        first = policies[0]
        if figures is not first:
            columns.append(f"x {first['policy']} (max {LRU_FACTOR_MAX:.0f})")
            for row, name in zip(rows, figures["calls"], strict=True):
                ours, lru = (each["calls"][name][KVTIER]["median_ns"] for each in (figures, first))
                row.append(f"{ours / lru:.2f}")
        table(
            f"{figures['policy']} beside vLLM's {figures['vllm_policy']}: "
            f"{figures['blocks']:,} blocks, {runs} runs",
            columns,
            rows,
        )


def show_scale(points: Sequence[dict[str, Any]]) -> None:
    """Print the cost by resident blocks."""
    for policy in dict.fromkeys(point["policy"] for point in points):
        ours = [point for point in points if point["policy"] == policy]
        rows = []
        for name in Call:
            calls = [point["calls"][name] for point in ours if name in point["calls"]]
            if not calls:
                continue
            for side in SIDES:
                medians = [call[side]["median_ns"] for call in calls]
                times = f"{medians[-1] / medians[0]:.2f}"
                rows.append([f"{name}: {side}", *(f"{each:,.0f}" for each in medians), times])
            rows.append([f"{name}: ratio", *(f"{call['ratio']:.2f}" for call in calls), ""])
        table(
            f"{policy}: ns a key (calls of a step: ns a call) by resident blocks",
            ["", *(f"{point['blocks']:,}" for point in ours), "last / first"],
            rows,
        )


def show_memory(
    policies: Sequence[dict[str, Any]], block_bytes_max: int, gc_pause_ms_max: float
) -> None:
    """Print memory and pauses."""
    for weighed in policies:
        both = [weighed[side] for side in (VLLM, KVTIER)]
        blocks = both[1]["blocks"]
        shown = (
            ("bytes a block (allocated)", "traced_bytes_per_block", 0),
            ("bytes a block (growth of the process)", "rss_bytes_per_block", 0),
            ("longest garbage collection, ms", "gc_longest_ms", 2),
        )
        bars = (
            (f"{block_bytes_max}", weighed["bytes_hold"]),
            ("", None),
            (f"{gc_pause_ms_max:.0f}", weighed["gc_holds"]),
        )
        rows = [
            [name, *(f"{each[key]:.{digits}f}" for each in both), bound, yes_or_no(holds)]
            for (name, key, digits), (bound, holds) in zip(shown, bars, strict=True)
        ]
        for name in both[1]["call_longest_us"]:
            pauses = (f"{each['call_longest_us'][name] / 1e3:.2f}" for each in both)
            rows.append([f"longest {name}, ms", *pauses, "", ""])
        table(
            f"{weighed['policy']}: {blocks:,} blocks, each side alone (times: CPU)",
            ["", "vLLM", "kvtier", "bound", "holds"],
            rows,
        )


# --- What resident blocks weigh, and the longest pauses: one manager alone, in a process.
#
# Alone, because the garbage collector walks over the objects of both sides if
# both are there.
#
# Three measures, from two passes over the same requests: the first for the
# growth of the process and for pauses, the second, slower one for the bytes
# that Python and NumPy have allocated (``tracemalloc``), keys included.
#


LOADED_REQUESTS_MAX: Final = 100
_PAGE_BYTES: Final = resource.getpagesize()


def main(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure one side."""
    count = job["request_blocks"]
    requests = max(1, job["blocks"] // count)
    setup = Setup(requests * count, BLOCK_BYTES, job["policy"])
    yield {
        "blocks": requests * count,
        **_pauses(job["side"], setup, requests, count),
        "traced_bytes_per_block": _traced_bytes(job["side"], setup, requests, count)
        / (requests * count),
    }


class Collections:
    """Times every run of the garbage collector."""

    def __init__(self) -> None:
        self.count = 0
        self.wall_ns = 0
        self.cpu_ns = 0
        self._started = (0, 0)

    def __call__(self, phase: str, _info: Mapping[str, int]) -> None:
        """Be told by ``gc`` that a collection begins or ends."""
        if phase == "start":
            self._started = (time.perf_counter_ns(), time.thread_time_ns())
            return
        wall, cpu = self._started
        self.count += 1
        self.wall_ns = max(self.wall_ns, time.perf_counter_ns() - wall)
        self.cpu_ns = max(self.cpu_ns, time.thread_time_ns() - cpu)


def _pauses(name: str, setup: Setup, requests: int, count: int) -> dict[str, Any]:
    before = _resident_bytes()
    side = ManagerSide(name, setup)
    freeze_gc_heap()  # as vLLM's engine core does when it has started
    watch, collections = PauseWatch(), Collections()
    gc.callbacks.append(collections)
    player = RequestPlayer(side, watch)
    for number in range(requests):
        player.store(number * count, count)
    slots_bytes = setup.slot_count * setup.block_bytes  # all touched, and no manager's cost
    grown = _resident_bytes() - before - slots_bytes
    few = min(requests, LOADED_REQUESTS_MAX)
    for request in random.Random(SEED).choices(range(requests), k=few):
        player.load(request * count, count)
    for number in range(requests, requests + few):
        player.store(number * count, count, evicting=True)
    gc.callbacks.remove(collections)
    close_all([side])
    return {
        "rss_bytes_per_block": grown / (requests * count),
        "gc_longest_ms": collections.cpu_ns / 1e6,
        "gc_longest_wall_ms": collections.wall_ns / 1e6,
        "gc_collections": collections.count,
        "call_longest_us": {call: ns / 1e3 for call, ns in watch.cpu_ns.items()},
        "call_longest_wall_us": {call: ns / 1e3 for call, ns in watch.wall_ns.items()},
    }


def _traced_bytes(name: str, setup: Setup, requests: int, count: int) -> int:
    tracemalloc.start()
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    side = ManagerSide(name, setup)
    player = RequestPlayer(side, Stopwatch())
    for number in range(requests):
        player.fill(number * count, count)
    del player
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    close_all([side])
    return after - before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
