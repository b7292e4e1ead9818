"""``stress.bench decide``: how well ``"load_policy": "auto"`` chooses.

Three real engines take turns, in each cell, on the same prompts: one that always loads, one that
always computes, and one that decides. What is compared is the time until the first token. Then
the tier steps from fast to slow and back, and the requests are counted until the decisions
are right again.
"""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import permutations
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import InternalError
from kvtier.tools.cli.terminal import progress, table, write_json
from stress.bench.about import about
from stress.bench.decide_engines import start_engines
from stress.bench.decide_figures import (
    PROMISED,
    PROMISED_MEDIAN,
    PROMISED_REQUESTS,
    cell_figures,
    noticed_after,
)
from stress.bench.decide_plan import (
    AUTO,
    BLOCK_BYTES,
    BLOCK_TOKENS,
    LOAD,
    POLICIES,
    RECOMPUTE,
    read_plan,
)
from stress.bench.rated_tier import Rate

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from stress.bench.decide_engines import Engines
    from stress.bench.decide_plan import Cell, Plan, Speed

LEARNING_TURNS: Final = 3
"""Before a cell is measured: what is learnt from one tier is not charged to the next one."""

HOPELESS: Final = ((1, 10.0), (2, 3.0))
"""Turns after which a choice that takes so many times what the other one takes has lost, and is
measured no more."""

ORDERS: Final = tuple(permutations(POLICIES))
"""Each comes after each other one as often: what comes after computing finds cold caches."""

STEPS: Final = ("at first", "to slow", "back to fast")
STEP_TURNS: Final = 10_000  #: turns have numbers, which make the ends of prompts; steps have others

BASE_REQUESTS: Final = 5
"""Of each choice, to tell which one is better before and after a step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--rates",
        metavar="SIZES",
        default="2GB,200MB,20MB,2MB,hang",
        help="what a simulated tier gives each second, one after the other; hang: it answers "
        "nothing (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts",
        dest="lengths",
        metavar="TOKENS",
        default="1000,4000,8000",
        help="lengths of prompts (default: %(default)s)",
    )
    parser.add_argument(
        "--clients",
        metavar="N,N,...",
        default="1,8",
        help="how many requests come at once (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=6,
        help="turns in each cell; figures are means of all requests (default: %(default)s)",
    )
    parser.add_argument(
        "--step-requests",
        type=int,
        metavar="N",
        default=30,
        help="requests before and after the tier steps from the fastest rate to the slowest, and "
        "back; 0 leaves that out (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the tables, write the files."""
    plan = read_plan(arguments)
    found: dict[str, Any] = {"computes_bytes_per_s": {}, "cells": [], "steps": []}
    try:
        _measure(plan, found)
    finally:  # what was measured before Ctrl-C is shown, too
        if found["cells"]:
            _report(arguments, plan, found)


def _measure(plan: Plan, found: dict[str, Any]) -> None:
    """Put into ``found`` what is measured, as soon as it is."""
    cells = plan.cells()
    moving = [cell for cell in cells if not cell.speed.rate.hangs]
    hung = [cell for cell in cells if cell.speed.rate.hangs]
    with start_engines(plan) as engines, progress("cells", len(cells) + len(STEPS)) as shown:

        def measure(some: Sequence[Cell]) -> None:
            for cell in some:
                found["cells"].append(_measured(engines, cell, plan))
                shown.advance()

        _store(engines, plan, found["computes_bytes_per_s"])
        measure(moving)
        if plan.step_speeds and plan.step_requests:
            for number, name in enumerate(STEPS):
                speed = plan.step_speeds[number % 2]
                found["steps"].append(_step(engines, plan, name, speed, number))
                shown.advance()
        measure(hung)  # last: a tier that was cut off is tried again at long intervals


def _report(arguments: argparse.Namespace, plan: Plan, found: dict[str, Any]) -> None:
    found["median_ratio"] = statistics.median(cell["ratio"] for cell in found["cells"])
    _show(plan, found)
    if arguments.json:
        names = ("rates", "lengths", "clients", "repeats", "step_requests")
        options = {name: getattr(arguments, name) for name in names}
        write_json(arguments.json, {**about(), "options": options, **found})


def _store(engines: Engines, plan: Plan, computed: dict[str, float]) -> None:
    """Have every tier store every prompt; note how many bytes are computed a second, by length.

    Raises ``InternalError`` if the tier does not have them all afterwards.
    """
    engines.set_rate(Rate())
    for tokens in plan.prompts:
        for policy in POLICIES:
            engines.by_policy[policy].store(tokens, plan.prompts_stored)
        seconds = min(engines.serve(RECOMPUTE, tokens, [0], -1)["first_token_s"])
        whole = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        computed[str(tokens)] = tokens / BLOCK_TOKENS * BLOCK_BYTES / seconds
        for number in range(plan.prompts_stored):
            cached = engines.serve(LOAD, tokens, [number], -1)["cached_tokens"]
            if cached != whole:
                raise InternalError(f"the tier has {cached} of {whole} tokens of a stored prompt")


def _measured(engines: Engines, cell: Cell, plan: Plan) -> dict[str, Any]:
    """Measure one cell: in each turn, all policies serve the same prompts."""
    engines.set_rate(cell.speed.rate)
    for turn in range(LEARNING_TURNS):
        engines.serve(AUTO, cell.tokens, _numbers(plan, cell.clients, turn), turn)
    times: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    turns: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for turn in range(plan.repeats):
        for policy in ORDERS[turn % len(ORDERS)]:
            if _is_hopeless(policy, turn, times):
                continue
            numbers = _numbers(plan, cell.clients, turn)
            answer = engines.serve(policy, cell.tokens, numbers, LEARNING_TURNS + turn)
            times[policy] += answer["first_token_s"]
            turns[policy].append(answer)
    return {
        "tier": cell.speed.name,
        "tokens": cell.tokens,
        "clients": cell.clients,
        **cell_figures(times),
        "auto_counts": _summed(turns[AUTO]),
        "turns": turns,
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


def _summed(turns: Sequence[dict[str, Any]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for turn in turns:
        total.update(turn["counts"])
        total["cached_tokens"] += turn["cached_tokens"]
    return dict(total)


def _step(engines: Engines, plan: Plan, name: str, speed: Speed, number: int) -> dict[str, Any]:
    """Have the tier go at another rate while one client after the other asks."""
    engines.set_rate(speed.rate)
    turn = STEP_TURNS * (number + 1)
    turns = []
    for _ in range(plan.step_requests):
        turn += 1
        turns.append(engines.serve(AUTO, plan.step_tokens, _numbers(plan, 1, turn), turn))
    times = [answer["first_token_s"][0] for answer in turns]
    base: dict[str, list[float]] = {LOAD: [], RECOMPUTE: []}
    for count in range(BASE_REQUESTS):
        for policy in base:
            if not _is_hopeless(policy, count, base):
                turn += 1
                answer = engines.serve(policy, plan.step_tokens, _numbers(plan, 1, turn), turn)
                base[policy] += answer["first_token_s"]
    medians = {policy: statistics.median(seconds) for policy, seconds in base.items()}
    better = min(medians, key=lambda policy: medians[policy])
    return {
        "step": name,
        "tier": speed.name,
        "better": better,
        "better_s": medians[better],
        "first_token_s": times,
        "noticed_after": noticed_after(times, medians[better]),
        "turns": turns,
    }


def _show(plan: Plan, found: dict[str, Any]) -> None:
    computed = ", ".join(
        f"{speed / 1e6:,.0f} MB/s with {int(tokens):,} tokens"
        for tokens, speed in found["computes_bytes_per_s"].items()
    )
    table(
        f"mean time to the first token, ms; {plan.repeats} turns; computing makes {computed}",
        ["tier", "tokens", "clients", *POLICIES, "auto / better", "of medians", ""],
        [_cell_row(cell) for cell in found["cells"]],
    )
    print(
        f"auto / better, median of the cells: {found['median_ratio']:.2f} "
        f"(at most {PROMISED_MEDIAN}; {PROMISED} in each)"
    )
    if found["steps"]:
        requests = plan.step_requests
        table(
            f"a step of the tier's rate, prompts of {plan.step_tokens:,} tokens one by one",
            ["step", "tier", "better", "ms", "noticed after, requests", "promised"],
            [_step_row(step, requests) for step in found["steps"]],
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


def _step_row(step: dict[str, Any], requests: int) -> list[str]:
    after = step["noticed_after"]
    return [
        step["step"],
        step["tier"],
        step["better"],
        f"{1e3 * step['better_s']:,.0f}",
        f"over {requests}" if after is None else f"{after}",
        f"{PROMISED_REQUESTS}",
    ]
