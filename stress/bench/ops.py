"""What each call costs the scheduler thread: both managers in one process.

Requests alternate between the sides, and who goes first alternates too, so
that a noisy machine and a warm cache favour neither. A run builds both
managers anew, fills them, loads what they hold, and stores as much again,
which evicts. The ratio of each call is one of medians from the same run.
"""

from __future__ import annotations

import gc
import random
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.bench.percentile import percentile
from kvtier.tools.held_signals import HeldSignals
from stress.bench.sides import KVTIER, SIDES, VLLM, ManagerSide, Setup, vllm_policy_beside
from stress.bench.turns import (
    BOUND_OF,
    LOOKUP_ASKED,
    LOOKUP_PROBING,
    PER_CALL,
    RequestPlayer,
    Stopwatch,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BLOCK_BYTES: Final = 4096
"""Of each slot. No byte of it is touched without a tier; a tier's files want whole pages."""

LRU_FACTOR_MAX: Final = 2.0
"""A policy may cost this many times what lru does."""

_SEED: Final = 2026
_WARM_UP_REQUESTS: Final = 8
_PROBED_REQUESTS: Final = 12


@dataclass(frozen=True)
class OpsOptions:
    """What is to be measured. Blocks are rounded down to whole requests, one at least."""

    blocks: int
    request_blocks: int
    runs: int
    with_tier: bool = False
    self_describing: bool = False  #: KV events carry tokens and parents
    samples: int | None = None  #: requests of each kind whose calls are timed; None: all that fit

    @property
    def requests(self) -> int:
        """How many requests fill the primary tier."""
        return max(1, self.blocks // self.request_blocks)


Watches = dict[str, Stopwatch]


def measure(options: OpsOptions, policy: str, on_run: Callable[[], object]) -> dict[str, Any]:
    """Return all figures of one policy. ``on_run`` is called after each run and the warm-up."""
    play(replace(options, blocks=_WARM_UP_REQUESTS * options.request_blocks), policy)
    on_run()
    runs = []
    for _ in range(options.runs):
        runs.append(play(options, policy))
        on_run()
    return {
        "policy": policy,
        "vllm_policy": vllm_policy_beside(policy),
        "blocks": options.requests * options.request_blocks,
        "calls": {name: figures(name, runs) for name in BOUND_OF if runs[0][KVTIER].ns[name]},
    }


def play(options: OpsOptions, policy: str) -> Watches:
    """Play one run on fresh managers and return what each side's calls took.

    Ctrl-C interrupts it between two requests: managers take locks inside.
    """
    watches = {name: Stopwatch() for name in SIDES}
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder, HeldSignals() as signals:
        place = Path(folder)
        if not options.with_tier:
            _play_probes(options, policy, place, watches, signals)
        sides = _build(options, policy, place if options.with_tier else None)
        try:
            _play_requests(options, sides, watches, signals)
        finally:
            _close(sides)
    return watches


def _play_requests(
    options: OpsOptions, sides: Sequence[ManagerSide], watches: Watches, signals: HeldSignals
) -> None:
    players = [RequestPlayer(side, watches[side.name]) for side in sides]
    count = options.request_blocks
    stored = options.requests
    samples = options.samples or stored
    loads = random.Random(_SEED).choices(range(stored), k=samples)
    for number in range(stored):
        for player in _alternating(players, number, signals):
            if number < stored - samples:
                player.fill(number * count, count)
            else:
                player.store(number * count, count)
    for number, request in enumerate(loads):
        for player in _alternating(players, number, signals):
            player.load(request * count, count)
            player.decode()
    for number in range(stored, stored + samples):
        for player in _alternating(players, number, signals):
            player.store(number * count, count, evicting=True)


def _play_probes(
    options: OpsOptions, policy: str, folder: Path, watches: Watches, signals: HeldSignals
) -> None:
    """Add lookups that ask a tier: a run without tiers has none. Nothing is stored."""
    few = replace(options, blocks=options.request_blocks)
    sides = _build(few, policy, folder)
    try:
        probes = {side.name: Stopwatch() for side in sides}
        players = [RequestPlayer(side, probes[side.name]) for side in sides]
        for number in range(_PROBED_REQUESTS):
            for player in _alternating(players, number, signals):
                player.ask(number * options.request_blocks, options.request_blocks)
    finally:
        _close(sides)
    for name, watch in probes.items():
        for call in (LOOKUP_ASKED, LOOKUP_PROBING):
            watches[name].take_over(call, watch)


def _alternating(
    players: Sequence[RequestPlayer], number: int, signals: HeldSignals
) -> Iterator[RequestPlayer]:
    """Yield the players for one request each, and let a signal through after each."""
    for player in players if number % 2 else players[::-1]:
        yield player
        signals.check()


def _build(options: OpsOptions, policy: str, tier_folder: Path | None) -> list[ManagerSide]:
    setup = Setup(
        options.requests * options.request_blocks,
        BLOCK_BYTES,
        policy,
        tier_folder,
        self_describing=options.self_describing,
    )
    sides: list[ManagerSide] = []
    try:
        sides += [ManagerSide(name, setup) for name in SIDES]
    except BaseException:
        _close(sides)
        raise
    gc.freeze()  # as vLLM's engine core does when it has started; the last run has collected
    return sides


def _close(sides: list[ManagerSide]) -> None:
    for side in sides:
        side.close()
    sides.clear()
    gc.unfreeze()
    gc.collect()


def figures(name: str, runs: Sequence[Watches]) -> dict[str, Any]:
    """Return one call's figures: medians of the runs' medians, and the ratios."""
    medians = {side: [statistics.median(run[side].ns[name]) for run in runs] for side in SIDES}
    ratios = [ours / theirs for ours, theirs in zip(medians[KVTIER], medians[VLLM], strict=True)]
    bound = BOUND_OF[name]
    ratio = statistics.median(medians[KVTIER]) / statistics.median(medians[VLLM])
    return {
        "unit": "ns/call" if name in PER_CALL else "ns/key",
        **{
            side: {
                "median_ns": statistics.median(medians[side]),
                "p99_ns": percentile([value for run in runs for value in run[side].ns[name]], 99),
            }
            for side in SIDES
        },
        "ratio": ratio,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "bound": bound,
        "holds": None if bound is None else ratio <= bound,
    }
