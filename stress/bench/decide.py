"""``stress.bench decide``: how well ``"load_policy": "auto"`` chooses.

Three real engines take turns, in each cell, on the same prompts: one that always loads, one that
always computes, as it has no tier, and one that decides. They differ in nothing else, and each has
a simulated tier of its own. What is compared is the time until the first token. Then the tier
steps from fast to slow and back, and the requests are counted until the decisions are right again.

The model's keys and values are so small, and its layers so large, that a CPU computes some tens
of MB of them a second. So storage of 2 MB/s loses against computing, and that of 2 GB/s wins.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.errors import InternalError, Misuse
from kvtier.plugin_api.sizes import parse_size
from kvtier.tools.terminal import progress, table
from stress.bench.harness import (
    Option,
    Report,
    at_least_one,
    medians,
    orders,
    own_folder,
    several,
    start_engine,
)
from stress.bench.rated_tier import TYPE_NAME, Rate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from stress.children import Part

OPTIONS: Final = (
    Option(
        "--rates",
        "2GB,200MB,20MB,2MB,hang",
        "what a simulated tier gives each second, one after the other; hang: it answers nothing",
    ),
    Option("--prompts", "1000,4000,8000", "lengths of prompts in tokens", several),
    Option("--clients", "1,8", "how many requests come at once", several),
    Option("--repeats", 6, "turns in each cell; figures are means of all requests", at_least_one),
    Option(
        "--step-requests",
        30,
        "requests before and after the tier steps from the fastest rate to the slowest, and back",
        at_least_one,
    ),
)

BLOCK_TOKENS: Final = 32
LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 2, 4, 1, 64, 512
#: keys and values of one block in float32; what one block of kvtier holds
BLOCK_BYTES: Final = 2 * LAYERS * KV_HEADS * HEAD_SIZE * BLOCK_TOKENS * 4
BATCH_TOKENS: Final = 2_048  #: that the engine computes in one step
OUTPUT_TOKENS: Final = 3
OWN_TOKENS: Final = 7  #: at a prompt's end, which nothing else has
IDLE_S: Final = 0.001
"""vLLM's own loop, in the process that users have, waits so long after a step without work."""

HOST_FACTOR: Final = 1.5
"""Of what all clients ask for at once: room for kvtier's reserve for stores."""

LOAD, RECOMPUTE, AUTO = "load", "recompute", "auto"
POLICIES: Final = (LOAD, RECOMPUTE, AUTO)
HANG: Final = "hang"

PROMPTS_MIN: Final = 4
"""Of each length, so that a client does not ask for the same one each time."""

PROMISED: Final = 1.1
"""Of the better choice's first token, in each cell and after each step."""

PROMISED_MEDIAN: Final = 1.0
"""The same, in the median over all cells."""

PROMISED_REQUESTS: Final = 10
"""After so many requests a step of a tier's rate has been noticed."""

WINDOW: Final = 5
"""Requests whose median tells whether a step was noticed: one on a busy machine tells nothing."""

LEARNING_TURNS: Final = 3
"""Before a cell is measured: what is learnt from one tier is not charged to the next one."""

HOPELESS: Final = ((1, 10.0), (2, 3.0))
"""Turns after which a choice that takes so many times what the other one takes has lost, and is
measured no more."""

STEPS: Final = ("at first", "to slow", "back to fast")
STEP_TURNS: Final = 10_000  #: turns have numbers, which make the ends of prompts; steps have others
BASE_REQUESTS: Final = 5
"""Of each choice, to tell which one is better before and after a step."""


class Cell(NamedTuple):
    """What is measured by itself."""

    tier: str  #: its rate, as it was asked for
    rate: Rate
    tokens: int  #: in each prompt
    clients: int  #: that ask at once


def cells_of(asked: argparse.Namespace) -> list[Cell]:
    """Return all cells. The tier never becomes faster: that is what the step is for."""
    rates = dict(map(_rate, asked.rates.split(",")))
    slower = sorted(rates, key=lambda name: (rates[name].hangs, -rates[name].bytes_per_s))
    return [
        Cell(name, rates[name], tokens, clients)
        for name in slower
        for tokens in asked.prompts
        for clients in asked.clients
    ]


def _rate(text: str) -> tuple[str, Rate]:
    if text == HANG:
        return HANG, Rate(hangs=True)
    name = text.removesuffix("/s")
    if not (bytes_per_s := parse_size(name)):
        raise Misuse(f"--rates: {text!r}: give bytes a second, such as 20MB,2GB, or {HANG}.")
    return f"{name}/s", Rate(bytes_per_s=float(bytes_per_s))


def measure(asked: argparse.Namespace, report: Report) -> None:
    """Measure cell by cell, and the steps before the tier that hangs."""
    cells = cells_of(asked)
    with start_engines(asked) as engines, progress("cells", len(cells) + len(STEPS)) as shown:

        def measure_cells(*, hang: bool) -> None:
            for cell in cells:
                if cell.rate.hangs is hang:
                    report["cells"].append(_measured(engines, cell, asked.repeats))
                    ratios = [each["ratio"] for each in report["cells"]]
                    report["median_ratio"] = statistics.median(ratios)
                    shown.advance()

        computed = {str(tokens): _store(engines, tokens) for tokens in asked.prompts}
        report |= {"computes_bytes_per_s": computed, "cells": [], "steps": []}
        measure_cells(hang=False)
        moving = [cell for cell in cells if not cell.rate.hangs]
        if len({cell.rate for cell in moving}) > 1:
            tokens = asked.prompts[len(asked.prompts) // 2]
            for number, name in enumerate(STEPS):
                tier = moving[0 if number % 2 == 0 else -1]._replace(tokens=tokens)
                report["steps"].append(_step(engines, tier, name, number, asked.step_requests))
                shown.advance()
        measure_cells(hang=True)  # last: a tier that was cut off is tried again at long intervals


class Engines:
    """One for each policy, side by side, and the rate of their tiers."""

    def __init__(self, parts: dict[str, Part], stored: int) -> None:
        self.stored = stored  #: prompts of each length
        self.rate = Rate()
        self._parts = parts

    def store(self, tokens: int) -> None:
        """Have each compute its prompts, one after the other, and have their tiers store them."""
        for number in range(self.stored):
            prompts = [[(f"{tokens} {number}", tokens)]]
            for part in self._parts.values():
                part.ask(prompts=prompts, output_tokens=OUTPUT_TOKENS)

    def serve(self, policy: str, tokens: int, first: int, clients: int, turn: int) -> Any:  # noqa: ANN401 - JSON
        """Have one engine asked for stored prompts from ``first`` on, all at once.

        Neither its GPU nor its DRAM has them any more.
        """
        names = [f"{tokens} {(first + client) % self.stored}" for client in range(clients)]
        return self._parts[policy].ask(
            prompts=[[(name, tokens), (f"{name} {turn}", OWN_TOKENS)] for name in names],
            output_tokens=OUTPUT_TOKENS,
            forget="dram",
            rate=self.rate,
        )


@contextmanager
def start_engines(asked: argparse.Namespace) -> Iterator[Engines]:
    """Start an engine for each policy; nothing is left of them when the block is left."""
    stored, clients = max(PROMPTS_MIN, *asked.clients), max(asked.clients)
    tokens_max = max(asked.prompts) + BLOCK_TOKENS
    blocks = sum(asked.prompts) // BLOCK_TOKENS * stored
    host_blocks = max(asked.prompts) // BLOCK_TOKENS * clients
    tier = {"type": TYPE_NAME, "capacity_bytes": (blocks + host_blocks) * BLOCK_BYTES}
    with ExitStack() as stack:
        folder = stack.enter_context(own_folder())
        parts = {}
        for policy in POLICIES:
            job = {
                "shape": (LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, tokens_max),
                "sizes": {
                    "block_tokens": BLOCK_TOKENS,
                    "num_gpu_blocks_override": clients * (tokens_max // BLOCK_TOKENS + 2) + 2,
                    "max_model_len": tokens_max,
                    "max_num_batched_tokens": BATCH_TOKENS,
                    "max_num_seqs": clients + 1,
                },
                "idle_s": IDLE_S,
                "extra_config": {
                    "spec_name": "KVTierOffloadingSpec",
                    "spec_module_path": "kvtier.vllm",
                    "cpu_bytes_to_use": int(HOST_FACTOR * host_blocks) * BLOCK_BYTES,
                    "secondary_tiers": [] if policy == RECOMPUTE else [tier],
                    # Or one long prompt would not be stored to its end.
                    "cascade_slots_fraction_max": 1.0,
                    "load_policy": "auto" if policy == AUTO else "always",
                    # The weights stay the same: the tier's blocks are to be found without DRAM.
                    "on_reset": "keep",
                },
            }
            parts[policy] = stack.enter_context(start_engine(folder, job))
        yield Engines(parts, stored)


def _store(engines: Engines, tokens: int) -> float:
    """Have every tier store every prompt; return how many bytes are computed a second.

    Raises ``InternalError`` if the tier does not have them all afterwards.
    """
    engines.store(tokens)
    seconds = min(engines.serve(RECOMPUTE, tokens, 0, 1, -1)["first_token_s"])
    whole = tokens // BLOCK_TOKENS * BLOCK_TOKENS
    for number in range(engines.stored):
        cached = engines.serve(LOAD, tokens, number, 1, -1)["cached_tokens"]
        if cached != whole:
            raise InternalError(f"the tier has {cached} of {whole} tokens of a stored prompt")
    return tokens / BLOCK_TOKENS * BLOCK_BYTES / float(seconds)


def _measured(engines: Engines, cell: Cell, repeats: int) -> dict[str, Any]:
    """Measure one cell: in each turn, all policies serve the same prompts."""
    engines.rate = cell.rate
    for turn in range(LEARNING_TURNS):
        engines.serve(AUTO, cell.tokens, turn, cell.clients, turn)
    times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    cached: dict[str, list[int]] = {policy: [] for policy in POLICIES}
    # Each comes after each other one as often: what comes after computing finds cold caches.
    for turn, order in zip(range(repeats), orders(POLICIES), strict=False):
        for policy in order:
            if not _is_hopeless(policy, turn, times):
                number = LEARNING_TURNS + turn
                answer = engines.serve(policy, cell.tokens, turn, cell.clients, number)
                times[policy] += answer["first_token_s"]
                cached[policy].append(answer["cached_tokens"])
    return {
        "tier": cell.tier,
        "tokens": cell.tokens,
        "clients": cell.clients,
        **cell_figures(times),
        "cached_tokens": cached,
    }


def cell_figures(first_token_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return what one cell shows; ``first_token_s``: of all requests, by policy."""
    means = {policy: statistics.fmean(times) for policy, times in first_token_s.items()}
    middle = medians(first_token_s)
    better = min((LOAD, RECOMPUTE), key=lambda policy: means[policy])
    return {
        "first_token_s": first_token_s,
        "mean_s": means,
        "better": better,
        "ratio": means[AUTO] / means[better],
        "ratio_of_medians": middle[AUTO] / min(middle[LOAD], middle[RECOMPUTE]),
    }


def _is_hopeless(policy: str, turns: int, times: dict[str, list[float]]) -> bool:
    if policy == AUTO:
        return False
    other = RECOMPUTE if policy == LOAD else LOAD
    return any(
        turns >= least and statistics.fmean(times[policy]) > factor * statistics.fmean(times[other])
        for least, factor in HOPELESS
    )


def _step(engines: Engines, tier: Cell, name: str, number: int, requests: int) -> dict[str, Any]:
    """Have the tier go at another rate while one client after the other asks."""
    engines.rate = tier.rate
    first = STEP_TURNS * (number + 1)

    def serve(policy: str, turn: int) -> list[float]:
        found: list[float] = engines.serve(policy, tier.tokens, turn, 1, turn)["first_token_s"]
        return found

    times = [serve(AUTO, first + request)[0] for request in range(requests)]
    turn = first + requests
    base: dict[str, list[float]] = {LOAD: [], RECOMPUTE: []}
    for count in range(BASE_REQUESTS):
        for policy in base:
            if not _is_hopeless(policy, count, base):
                turn += 1
                base[policy] += serve(policy, turn)
    middle = medians(base)
    better = min(middle, key=lambda policy: middle[policy])
    return {
        "step": name,
        "tier": tier.tier,
        "tokens": tier.tokens,
        "better": better,
        "better_s": middle[better],
        "first_token_s": times,
        "noticed_after": noticed_after(times, middle[better]),
    }


def noticed_after(first_token_s: Sequence[float], better_s: float) -> int | None:
    """Return after how many requests a step has been noticed; None: not by the end.

    From there on, ``WINDOW`` requests in a row have a median of at most ``PROMISED`` times
    ``better_s``.
    """
    for start in range(len(first_token_s) - WINDOW + 1):
        if statistics.median(first_token_s[start : start + WINDOW]) <= PROMISED * better_s:
            return start
    return None


def show(report: Report) -> None:
    """Print the tables."""
    if not report["cells"]:
        return
    computed = ", ".join(
        f"{speed / 1e6:,.0f} MB/s with {int(tokens):,} tokens"
        for tokens, speed in report["computes_bytes_per_s"].items()
    )
    turns = report["options"]["repeats"]
    table(
        f"mean time to the first token, ms; {turns} turns; computing makes {computed}",
        ["tier", "tokens", "clients", *POLICIES, "auto / better", "of medians", ""],
        [
            [
                cell["tier"],
                f"{cell['tokens']:,}",
                f"{cell['clients']}",
                *(f"{1e3 * cell['mean_s'][policy]:,.0f}" for policy in POLICIES),
                f"{cell['ratio']:.2f}",
                f"{cell['ratio_of_medians']:.2f}",
                "" if cell["ratio"] <= PROMISED else "short",
            ]
            for cell in report["cells"]
        ],
    )
    print(
        f"auto / better, median of the cells: {report['median_ratio']:.2f} "
        f"(at most {PROMISED_MEDIAN}; {PROMISED} in each)"
    )
    if report["steps"]:
        tokens = report["steps"][0]["tokens"]
        table(
            f"a step of the tier's rate, prompts of {tokens:,} tokens one by one",
            ["step", "tier", "better", "ms", "noticed after, requests", "promised"],
            [
                [
                    step["step"],
                    step["tier"],
                    step["better"],
                    f"{1e3 * step['better_s']:,.0f}",
                    f"over {len(step['first_token_s'])}"
                    if step["noticed_after"] is None
                    else f"{step['noticed_after']}",
                    f"{PROMISED_REQUESTS}",
                ]
                for step in report["steps"]
            ],
        )
