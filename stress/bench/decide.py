"""``stress.bench decide``: how well ``"load_policy": "auto"`` chooses.

Three real engines take turns, in each cell, on the same prompts: one that always loads, one that
always computes, and one that decides. What is compared is the time until the first token. Then
the tier steps from fast to slow and back, and the requests are counted until the decisions
are right again.
"""

from __future__ import annotations

import statistics
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import InternalError
from kvtier.tools.terminal import progress, table
from stress.bench.decide_engines import start_engines
from stress.bench.decide_plan import (
    AUTO,
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LOAD,
    POLICIES,
    RECOMPUTE,
    WINDOW,
    read_plan,
)
from stress.bench.harness import Option, Report, medians, orders

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from stress.bench.decide_engines import Engines
    from stress.bench.decide_plan import Cell, Plan, Speed

OPTIONS: Final = (
    Option(
        "--rates",
        "2GB,200MB,20MB,2MB,hang",
        "what a simulated tier gives each second, one after the other; hang: it answers nothing",
    ),
    Option("--prompts", "1000,4000,8000", "lengths of prompts in tokens"),
    Option("--clients", "1,8", "how many requests come at once"),
    Option("--repeats", 6, "turns in each cell; figures are means of all requests"),
    Option(
        "--step-requests",
        30,
        "requests before and after the tier steps from the fastest rate to the slowest, and "
        "back; 0 leaves that out",
        least=0,
    ),
)

PROMISED: Final = 1.1
"""Of the better choice's first token, in each cell and after each step."""

PROMISED_MEDIAN: Final = 1.0
"""The same, in the median over all cells."""

PROMISED_REQUESTS: Final = 10
"""After so many requests a step of a tier's rate has been noticed."""

LEARNING_TURNS: Final = 3
"""Before a cell is measured: what is learnt from one tier is not charged to the next one."""

HOPELESS: Final = ((1, 10.0), (2, 3.0))
"""Turns after which a choice that takes so many times what the other one takes has lost, and is
measured no more."""

STEPS: Final = ("at first", "to slow", "back to fast")
STEP_TURNS: Final = 10_000  #: turns have numbers, which make the ends of prompts; steps have others

BASE_REQUESTS: Final = 5
"""Of each choice, to tell which one is better before and after a step."""


def measure(asked: argparse.Namespace, report: Report) -> None:
    """Measure cell by cell, and the steps before the tier that hangs."""
    plan = read_plan(asked)
    import_module("vllm")  # before the engines are started: without it there is nothing to do
    cells = plan.cells()
    with start_engines(plan) as engines, progress("cells", len(cells) + len(STEPS)) as shown:

        def measure_cells(*, hang: bool) -> None:
            for cell in cells:
                if cell.speed.rate.hangs is hang:
                    report["cells"].append(_measured(engines, cell, plan))
                    ratios = [each["ratio"] for each in report["cells"]]
                    report["median_ratio"] = statistics.median(ratios)
                    shown.advance()

        computed = _store(engines, plan)
        report |= {"computes_bytes_per_s": computed, "cells": [], "steps": []}
        measure_cells(hang=False)
        if plan.step_speeds and plan.step_requests:
            for number, name in enumerate(STEPS):
                speed = plan.step_speeds[number % 2]
                report["steps"].append(_step(engines, plan, name, speed, number))
                shown.advance()
        measure_cells(hang=True)  # last: a tier that was cut off is tried again at long intervals


def _store(engines: Engines, plan: Plan) -> dict[str, float]:
    """Have every tier store every prompt; return how many bytes are computed a second, by length.

    Raises ``InternalError`` if the tier does not have them all afterwards.
    """
    computed = {}
    for tokens in plan.prompts:
        engines.store(tokens, plan.prompts_stored)
        seconds = min(engines.serve(RECOMPUTE, tokens, [0], -1)["first_token_s"])
        whole = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        computed[str(tokens)] = tokens / BLOCK_TOKENS * BLOCK_BYTES / seconds
        for number in range(plan.prompts_stored):
            cached = engines.serve(LOAD, tokens, [number], -1)["cached_tokens"]
            if cached != whole:
                raise InternalError(f"the tier has {cached} of {whole} tokens of a stored prompt")
    return computed


def _measured(engines: Engines, cell: Cell, plan: Plan) -> dict[str, Any]:
    """Measure one cell: in each turn, all policies serve the same prompts."""
    engines.rate = cell.speed.rate
    for turn in range(LEARNING_TURNS):
        engines.serve(AUTO, cell.tokens, _numbers(plan, cell.clients, turn), turn)
    times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    turns: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    # Each comes after each other one as often: what comes after computing finds cold caches.
    for turn, order in zip(range(plan.repeats), orders(POLICIES), strict=False):
        numbers = _numbers(plan, cell.clients, turn)
        for policy in order:
            if _is_hopeless(policy, turn, times):
                continue
            answer = engines.serve(policy, cell.tokens, numbers, LEARNING_TURNS + turn)
            times[policy] += answer["first_token_s"]
            turns[policy].append(answer)
    return {
        "tier": cell.speed.name,
        "tokens": cell.tokens,
        "clients": cell.clients,
        **cell_figures(times),
        "turns": turns,
    }


def cell_figures(first_token_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return what one cell shows; ``first_token_s``: of all requests, by policy."""
    means = {policy: statistics.fmean(times) for policy, times in first_token_s.items()}
    middle = medians(first_token_s)
    better = min((LOAD, RECOMPUTE), key=lambda policy: means[policy])
    return {
        "mean_s": means,
        "median_s": middle,
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


def _numbers(plan: Plan, clients: int, turn: int) -> list[int]:
    """Return which prompts are asked for in a turn."""
    return [(turn + client) % plan.prompts_stored for client in range(clients)]


def _step(engines: Engines, plan: Plan, name: str, speed: Speed, number: int) -> dict[str, Any]:
    """Have the tier go at another rate while one client after the other asks."""
    engines.rate = speed.rate
    first = STEP_TURNS * (number + 1)

    def serve(policy: str, turn: int) -> dict[str, Any]:
        found: dict[str, Any] = engines.serve(
            policy, plan.step_tokens, _numbers(plan, 1, turn), turn
        )
        return found

    turns = [serve(AUTO, first + request) for request in range(plan.step_requests)]
    times = [answer["first_token_s"][0] for answer in turns]
    turn = first + plan.step_requests
    base: dict[str, list[float]] = {LOAD: [], RECOMPUTE: []}
    for count in range(BASE_REQUESTS):
        for policy in base:
            if not _is_hopeless(policy, count, base):
                turn += 1
                base[policy] += serve(policy, turn)["first_token_s"]
    middle = medians(base)
    better = min(middle, key=lambda policy: middle[policy])
    return {
        "step": name,
        "tier": speed.name,
        "tokens": plan.step_tokens,
        "better": better,
        "better_s": middle[better],
        "first_token_s": times,
        "noticed_after": noticed_after(times, middle[better]),
        "turns": turns,
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
        [_cell_row(cell) for cell in report["cells"]],
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
            [_step_row(step) for step in report["steps"]],
        )


def _cell_row(cell: dict[str, Any]) -> list[str]:
    return [
        cell["tier"],
        f"{cell['tokens']:,}",
        f"{cell['clients']}",
        *(f"{1e3 * cell['mean_s'][policy]:,.0f}" for policy in POLICIES),
        f"{cell['ratio']:.2f}",
        f"{cell['ratio_of_medians']:.2f}",
        "" if cell["ratio"] <= PROMISED else "short",
    ]


def _step_row(step: dict[str, Any]) -> list[str]:
    after = step["noticed_after"]
    return [
        step["step"],
        step["tier"],
        step["better"],
        f"{1e3 * step['better_s']:,.0f}",
        f"over {len(step['first_token_s'])}" if after is None else f"{after}",
        f"{PROMISED_REQUESTS}",
    ]
