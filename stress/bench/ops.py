"""``stress.bench ops``: what each call costs the scheduler thread, both managers in one process.

Requests alternate between the sides, and who goes first alternates too, so
that a noisy machine and a warm cache favour neither. A run builds both
managers anew, fills them, loads what they hold, and stores as much again,
which evicts. The ratio of each call is one of medians from the same run.

What resident blocks weigh, and the longest pauses, are measured with one manager alone in a
process of its own: the garbage collector walks over the objects of both sides if both are there.
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
from kvtier.tools.terminal import check_can_write, progress, table
from stress.bench.harness import (
    RUNS,
    SEED,
    Option,
    Report,
    at_least_one,
    orders,
    own_folder,
    ratio,
    ratio_cells,
    several,
    yes_or_no,
)
from stress.bench.sides import KVTIER, SIDES, VLLM, ManagerSide, Setup
from stress.bench.turns import Call, PauseWatch, RequestPlayer, Stopwatch
from stress.children import run_child

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping, Sequence

OPTIONS: Final = (
    Option("--blocks", 20_000, "blocks that are resident", at_least_one),
    Option("--request-blocks", 512, "blocks in each request", at_least_one),
    Option("--policies", "lru", "eviction policies of kvtier to measure, e.g. lru,reuse"),
    RUNS,
    Option(
        "--secondary-tiers",
        "0",
        "1 gives both sides an fs tier, which is idle while calls are timed",
        choices=("0", "1"),
    ),
    Option(
        "--scale", None, "measure a key's cost at each number of blocks: 1e3,1e4,1e5,1e6", several
    ),
    Option("--picture", None, "plot what --scale measures to this file, as PNG"),
)

BLOCK_BYTES: Final = 4096
"""Of each slot. No byte of it is touched without a tier; a tier's files want whole pages."""

SCALE_REQUEST_BLOCKS: Final = 128  #: the same at every size, and a tenth of the smallest
SCALE_SAMPLES: Final = 150
BLOCK_BYTES_MAX: Final = 400  #: of memory for each resident block, everything included
GC_PAUSE_MS_MAX: Final = 5.0
LRU_FACTOR_MAX: Final = 2.0  #: a policy may cost this many times what lru does
WARM_UP_REQUESTS: Final = 8
PROBED_REQUESTS: Final = 12
LOADED_REQUESTS_MAX: Final = 100
DRAWN: Final = (
    (Call.LOOKUP_HIT, Call.LOOKUP_MISS, Call.PREPARE_STORE, Call.PREPARE_STORE_EVICTING),
    (Call.COMPLETE_STORE, Call.PREPARE_LOAD, Call.COMPLETE_LOAD, Call.TOUCH),
)
_PAGE_BYTES: Final = resource.getpagesize()


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
Play = Callable[[RequestPlayer, int, int], None]


def measure(asked: argparse.Namespace, report: Report) -> None:
    """Measure calls, then calls at each size, then memory and pauses."""
    policies = asked.policies.split(",")
    for name in policies:
        make_policy(name, 1)  # an unknown one is refused before the first run
    if asked.picture:
        check_can_write(asked.picture)
        if not asked.scale:
            raise Misuse("--picture draws what --scale measures: give both.")
    count = min(asked.request_blocks, asked.blocks)
    plans = [
        ("policies", OpsOptions(asked.blocks, count, asked.runs, asked.secondary_tiers == "1"))
    ]
    for size in asked.scale or ():
        count_there = min(SCALE_REQUEST_BLOCKS, size)
        plans.append(
            ("scale", OpsOptions(size, count_there, asked.runs, samples=SCALE_SAMPLES)),
        )
    report |= {"policies": [], "scale": [], "memory": []}
    for key, options in plans:
        for policy in policies:
            with progress(f"{options.blocks:,} blocks, {policy}", options.runs + 1) as shown:
                report[key].append(measure_policy(options, policy, shown.advance))
    job = {"blocks": max(asked.blocks, *(asked.scale or (0,))), "request_blocks": count}
    with progress("memory and pauses", len(policies) * len(SIDES)) as shown:
        for policy in policies:
            weighed: dict[str, Any] = {"policy": policy}
            for side in SIDES:
                weighed[side] = run_child(__name__, {**job, "policy": policy, "side": side})
                shown.advance()
            report["memory"].append(weighed)
    if asked.picture:
        draw_scale(report["scale"], asked.picture)


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
        "blocks": options.requests * options.request_blocks,
        "calls": {name: figures(name, runs) for name in Call if runs[0][KVTIER].ns[name]},
    }


def figures(name: Call, runs: Sequence[Watches]) -> dict[str, Any]:
    """Return one call's figures: medians of the runs' medians, and the ratios."""
    of_runs = {side: [statistics.median(run[side].ns[name]) for run in runs] for side in SIDES}
    found: dict[str, Any] = {
        side: {
            "median_ns": statistics.median(of_runs[side]),
            "p99_ns": percentile([value for run in runs for value in run[side].ns[name]], 99),
        }
        for side in SIDES
    }
    return found | ratio(of_runs[KVTIER], of_runs[VLLM], at_most=name.bound)


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
                    watches[name].ns[call] = probes[name].ns[call]
        place = folder if options.with_tier else None
        _play_requests(options, policy, place, watches, signals, _requests(options))
    return watches


def _requests(options: OpsOptions) -> Iterator[tuple[Play, int]]:
    """Yield how each request is played, and its number: fill, load what is there, evict."""
    stored = options.requests
    samples = options.samples or stored
    for number in range(stored):
        yield RequestPlayer.fill if number < stored - samples else RequestPlayer.store, number
    for number in random.Random(SEED).choices(range(stored), k=samples):
        yield partial(RequestPlayer.load, decodes=True), number
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
        _close_all(sides)


def _close_all(sides: list[ManagerSide]) -> None:
    """Close them, and leave nothing of them to the garbage collector."""
    for side in sides:
        side.close()
    sides.clear()
    gc.unfreeze()
    gc.collect()


def main(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure memory and pauses of one side.

    In two passes over the same requests: the first for the growth of the process and for pauses,
    the second, slower one for the bytes that Python and NumPy have allocated, keys included.
    """
    count = job["request_blocks"]
    requests = max(1, job["blocks"] // count)
    setup = Setup(requests * count, BLOCK_BYTES, job["policy"])
    yield {
        "blocks": requests * count,
        **_pauses(job["side"], setup, requests, count),
        "traced_bytes_per_block": _traced_bytes(job["side"], setup, requests, count)
        / (requests * count),
    }


def _pauses(name: str, setup: Setup, requests: int, count: int) -> dict[str, Any]:
    before = _resident_bytes()
    side = ManagerSide(name, setup)
    freeze_gc_heap()  # as vLLM's engine core does when it has started
    watch, began_ns, longest_ns = PauseWatch(), 0, 0

    def on_collection(phase: str, _info: Mapping[str, int]) -> None:
        nonlocal began_ns, longest_ns
        if phase == "start":
            began_ns = time.thread_time_ns()
        else:
            longest_ns = max(longest_ns, time.thread_time_ns() - began_ns)

    gc.callbacks.append(on_collection)
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
    gc.callbacks.remove(on_collection)
    _close_all([side])
    return {
        "rss_bytes_per_block": grown / (requests * count),
        "gc_longest_ms": longest_ns / 1e6,
        "call_longest_ms": {call: ns / 1e6 for call, ns in watch.longest_ns.items()},
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
    _close_all([side])
    return after - before


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def show(report: Report) -> None:
    """Print the tables."""
    runs, first = report["options"]["runs"], report["policies"][:1]
    for found in report["policies"]:
        columns = ["ns a key", "vLLM", "p99", "kvtier", "p99", "ratio", "of runs", "bound", "holds"]
        rows = [
            [
                name if Call(name).is_of_keys else f"{name} (a call)",
                *(f"{call[side][key]:,.0f}" for side in SIDES for key in ("median_ns", "p99_ns")),
                *(cell.removeprefix("<= ") for cell in ratio_cells(call)),
            ]
            for name, call in found["calls"].items()
        ]
        if [found] != first:
            columns.append(f"x {first[0]['policy']} (max {LRU_FACTOR_MAX:.0f})")
            for row, name in zip(rows, found["calls"], strict=True):
                ours, lru = (one["calls"][name][KVTIER]["median_ns"] for one in (found, *first))
                row.append(f"{ours / lru:.2f}")
        blocks = f"{found['blocks']:,} blocks, {runs} runs"
        table(f"{found['policy']} beside vLLM's lru: {blocks}", columns, rows)
    for policy in dict.fromkeys(point["policy"] for point in report["scale"]):
        _show_scale(policy, [point for point in report["scale"] if point["policy"] == policy])
    for weighed in report["memory"]:
        _show_memory(weighed)


def _show_scale(policy: str, points: Sequence[dict[str, Any]]) -> None:
    rows = []
    for name in points[0]["calls"]:
        calls = [point["calls"][name] for point in points]
        for side in SIDES:
            medians = [call[side]["median_ns"] for call in calls]
            times = f"{medians[-1] / medians[0]:.2f}"
            rows.append([f"{name}: {side}", *(f"{each:,.0f}" for each in medians), times])
        rows.append([f"{name}: ratio", *(f"{call['ratio']:.2f}" for call in calls), ""])
    table(
        f"{policy}: ns a key (calls of a step: ns a call) by resident blocks",
        ["", *(f"{point['blocks']:,}" for point in points), "last / first"],
        rows,
    )


def draw_scale(points: Sequence[dict[str, Any]], path: str) -> None:
    """Write the picture to ``path``. ``points``: what ``measure_policy`` returned at each size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - only to draw
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    figure = Figure(figsize=(12.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    policies = list(dict.fromkeys(point["policy"] for point in points))
    lines = [
        (VLLM, policies[0], "vLLM, lru"),
        *((KVTIER, each, f"kvtier, {each}") for each in policies),
    ]
    for row, calls in zip(figure.subplots(2, 4), DRAWN, strict=True):
        for axes, call in zip(row, calls, strict=True):
            for side, policy, label in lines:
                of_line = [point for point in points if point["policy"] == policy]
                sizes = [point["blocks"] for point in of_line]
                medians = [point["calls"][call][side]["median_ns"] for point in of_line]
                axes.plot(sizes, medians, "o-", label=label, ms=4)
            axes.set_title(call, fontsize=10)
            axes.set(xscale="log", ylim=(0, None), xlabel="resident blocks", ylabel="ns a key")
            axes.grid(visible=True, alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=9)
    figure.savefig(path, dpi=110)


def _show_memory(weighed: dict[str, Any]) -> None:
    both = [weighed[side] for side in SIDES]
    rows = []
    for name, key, digits, most in (
        ("bytes a block (allocated)", "traced_bytes_per_block", 0, BLOCK_BYTES_MAX),
        ("bytes a block (growth of the process)", "rss_bytes_per_block", 0, None),
        ("longest garbage collection, ms", "gc_longest_ms", 2, GC_PAUSE_MS_MAX),
    ):
        bound = ["", ""] if most is None else [f"{most:.0f}", yes_or_no(both[1][key] <= most)]
        rows.append([name, *(f"{each[key]:.{digits}f}" for each in both), *bound])
    for name in both[1]["call_longest_ms"]:
        pauses = (f"{each['call_longest_ms'][name]:.2f}" for each in both)
        rows.append([f"longest {name}, ms", *pauses, "", ""])
    table(
        f"{weighed['policy']}: {both[1]['blocks']:,} blocks, each side alone (times: CPU)",
        ["", "vLLM", "kvtier", "bound", "holds"],
        rows,
    )
