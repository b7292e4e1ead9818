"""``stress.bench decide``: how well ``"load_policy": "auto"`` chooses.

Three real engines take turns, in each cell, on the same prompts: one that always loads, one that
always computes, and one that decides. What is compared is the time until the first token. Then
the tier steps from fast to slow and back, and the requests are counted until the decisions
are right again.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.errors import InternalError, Misuse
from kvtier.plugin_api.sizes import parse_size
from kvtier.tools.terminal import progress, table
from stress.bench.children import ENVIRONMENT, Part, own_engine_id, start_part
from stress.bench.harness import Option, Report, medians, orders, own_folder
from stress.bench.rated_tier import TYPE_NAME, Rate, RatedBackend, register

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from stress.bench.driven_engine import DrivenEngine

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


# --- What ``stress.bench decide`` asks for: tiers, prompts, clients; and the model's shape.
#
# The model's keys and values are so small, and its layers so large, that a CPU computes some tens
# of MB of them a second. So storage of 2 MB/s loses against computing, and that of 2 GB/s wins.
#


BLOCK_TOKENS: Final = 32
LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY = 2, 4, 1, 64, 512
#: keys and values of one block in float32; what one block of kvtier holds
BLOCK_BYTES: Final = 2 * LAYERS * KV_HEADS * HEAD_SIZE * BLOCK_TOKENS * 4
BATCH_TOKENS: Final = 2_048  #: that the engine computes in one step

LOAD, RECOMPUTE, AUTO = "load", "recompute", "auto"
POLICIES: Final = (LOAD, RECOMPUTE, AUTO)

HANG: Final = "hang"
TOKENS_MIN: Final = 4 * BLOCK_TOKENS
TOKENS_MAX: Final = 32_000
CLIENTS_MAX: Final = 64
WINDOW: Final = 5
"""Requests whose median tells whether a step was noticed: one on a busy machine tells nothing."""

PROMPTS_MIN: Final = 4
"""Of each length, so that a client does not ask for the same one each time."""


class Speed(NamedTuple):
    """How fast the tier is in some cells, as it was asked for."""

    name: str
    rate: Rate


class Cell(NamedTuple):
    """What is measured by itself."""

    speed: Speed
    tokens: int  #: in each prompt
    clients: int  #: that ask at once


class Plan(NamedTuple):
    """All that is measured."""

    speeds: tuple[Speed, ...]
    prompts: tuple[int, ...]
    clients: tuple[int, ...]
    repeats: int
    step_requests: int

    def cells(self) -> list[Cell]:
        """Return all cells. The tier never becomes faster: that is what the step is for."""
        return [
            Cell(speed, tokens, clients)
            for speed in self.speeds
            for tokens in self.prompts
            for clients in self.clients
        ]

    @property
    def prompts_stored(self) -> int:
        """How many prompts of each length there are."""
        return max(PROMPTS_MIN, *self.clients)

    @property
    def step_speeds(self) -> tuple[Speed, Speed] | None:
        """The fastest and the slowest tier, between which it steps; None: there are no two."""
        moving = [speed for speed in self.speeds if not speed.rate.hangs]
        return (moving[0], moving[-1]) if len(moving) > 1 else None

    @property
    def step_tokens(self) -> int:
        """The prompts of the step's traffic."""
        return sorted(self.prompts)[len(self.prompts) // 2]


def read_plan(asked: argparse.Namespace) -> Plan:
    """Read what the command was given. Raises ``Misuse``."""
    speeds = {speed.name: speed for speed in map(_speed, asked.rates.split(","))}
    if 0 < asked.step_requests < WINDOW:
        raise Misuse(f"--step-requests {asked.step_requests} must be at least {WINDOW}, or 0.")
    return Plan(
        tuple(sorted(speeds.values(), key=lambda speed: _slowness(speed.rate))),
        _whole_numbers("--prompts", asked.prompts, TOKENS_MIN, TOKENS_MAX),
        _whole_numbers("--clients", asked.clients, 1, CLIENTS_MAX),
        asked.repeats,
        asked.step_requests,
    )


def _speed(text: str) -> Speed:
    name = text.strip()
    if name == HANG:
        return Speed(name, Rate(hangs=True))
    bytes_per_s = parse_size(name.removesuffix("/s"))
    if not bytes_per_s:
        raise Misuse(
            f"--rates: {name!r} is no rate. Give bytes a second, such as 20MB,2GB, or {HANG}."
        )
    return Speed(f"{name.removesuffix('/s')}/s", Rate(bytes_per_s=float(bytes_per_s)))


def _slowness(rate: Rate) -> tuple[bool, float]:
    return rate.hangs, -rate.bytes_per_s


def _whole_numbers(option: str, text: str, least: int, most: int) -> tuple[int, ...]:
    try:
        numbers = sorted({int(each.replace("_", "")) for each in text.split(",")})
    except ValueError:
        raise Misuse(f"{option} {text!r}: give whole numbers, separated by commas.") from None
    if not least <= numbers[0] <= numbers[-1] <= most:
        raise Misuse(f"{option} {text!r}: each must be between {least} and {most}.")
    return tuple(numbers)


# --- The engines of ``stress.bench decide``: one for each policy, side by side, in turns.
#
# They differ in nothing but what is compared: one loads whatever its tier has, one has no
# tier and so computes everything, and one decides. Each has a simulated tier of its own.
#


HOST_FACTOR: Final = 1.5
"""Of what all clients ask for at once: room for kvtier's reserve for stores."""


class Engines:
    """All of them, and the rate of their tiers."""

    def __init__(self, parts: dict[str, Part]) -> None:
        self._parts = parts
        self.rate = Rate()

    def store(self, tokens: int, count: int) -> None:
        """Have each compute and store this many prompts."""
        for part in self._parts.values():
            part.ask(tokens=tokens, count=count)

    def serve(self, policy: str, tokens: int, numbers: Sequence[int], turn: int) -> Any:  # noqa: ANN401 - JSON
        """Have one engine asked for prompts at once, while the others rest."""
        return self._parts[policy].ask(tokens=tokens, numbers=numbers, turn=turn, rate=self.rate)


@contextmanager
def start_engines(plan: Plan) -> Iterator[Engines]:
    """Start an engine for each policy; nothing is left of them when the block is left."""
    with ExitStack() as stack:
        folder = stack.enter_context(own_folder())
        (folder / "tmp").mkdir()  # engines are killed at the end: what they leave goes with it
        environment = {**ENVIRONMENT, "TMPDIR": str(folder / "tmp")}
        parts = {}
        for policy in POLICIES:
            job = {
                "model": str(folder / "model"),
                "engine_id": stack.enter_context(own_engine_id()),
                "tokens_max": max(plan.prompts),
                "clients": max(plan.clients),
                "extra_config": _extra_config(policy, plan),
            }
            parts[policy] = stack.enter_context(start_part(__name__, job, environment))
            parts[policy].answer()  # one after the other: the first one makes the model
        yield Engines(parts)


def _extra_config(policy: str, plan: Plan) -> dict[str, Any]:
    blocks = sum(plan.prompts) // BLOCK_TOKENS * plan.prompts_stored
    host_blocks = max(plan.prompts) // BLOCK_TOKENS * max(plan.clients)
    tier = {"type": TYPE_NAME, "capacity_bytes": (blocks + host_blocks) * BLOCK_BYTES}
    return {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "cpu_bytes_to_use": int(HOST_FACTOR * host_blocks) * BLOCK_BYTES,
        "secondary_tiers": [] if policy == RECOMPUTE else [tier],
        "cascade_slots_fraction_max": 1.0,  # or one long prompt would not be stored to its end
        "load_policy": "auto" if policy == AUTO else "always",
        # The weights stay the same: what is in the tier is to be found after DRAM was emptied.
        "on_reset": "keep",
    }


# --- One engine of ``stress.bench decide``, in a process of its own, that does what it is told.
#
# ``Engines`` gives it orders. The engine core runs in this process, and rests
# between orders, so that the engines take turns on the machine's cores.
#


OUTPUT_TOKENS: Final = 3
OWN_TOKENS: Final = 7  #: at a prompt's end, which nothing else has
IDLE_S: Final = 0.001
"""vLLM's own loop, in the process that users have, waits so long after a step without work."""


def main(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start it, then carry out an order a line until there are no more."""
    from kvtier.tools.demo.engine import LlamaShape  # noqa: PLC0415 - of an engine alone
    from stress.bench.driven_engine import DrivenEngine  # noqa: PLC0415 - as above

    register(Path(tempfile.mkdtemp()))
    tokens_max = job["tokens_max"] + BLOCK_TOKENS
    engine = DrivenEngine(
        job,
        shape=LlamaShape(LAYERS, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, tokens_max),
        block_tokens=BLOCK_TOKENS,
        idle_s=IDLE_S,
        num_gpu_blocks_override=job["clients"] * (tokens_max // BLOCK_TOKENS + 2) + 2,
        max_model_len=tokens_max,
        max_num_batched_tokens=BATCH_TOKENS,
        max_num_seqs=job["clients"] + 1,
    )
    yield {}
    for line in sys.stdin:
        order = json.loads(line)
        yield _ask_for(engine, **order) if "turn" in order else _compute_and_store(engine, **order)


def _compute_and_store(engine: DrivenEngine, tokens: int, count: int) -> dict[str, Any]:
    """Compute prompts, one after the other, and have the tier store them."""
    for number in range(count):
        engine.generate([_prompt(tokens, number)], OUTPUT_TOKENS)
        engine.settle()
    return {"stored_blocks": count * (tokens // BLOCK_TOKENS)}


def _ask_for(
    engine: DrivenEngine, tokens: int, numbers: Sequence[int], turn: int, rate: Sequence[Any]
) -> dict[str, Any]:
    """Ask for stored prompts, all at once, which neither the GPU nor DRAM has any more."""
    RatedBackend.rate = Rate(*rate)
    engine.forget(hangs=RatedBackend.rate.hangs)
    prompts = [
        _prompt(tokens, number) + _random_tokens(OWN_TOKENS, f"{tokens} {number} {turn}")
        for number in numbers
    ]
    generated = engine.generate(prompts, OUTPUT_TOKENS)
    return {
        "first_token_s": [each.first_token_s for each in generated],
        "cached_tokens": sum(each.cached_tokens for each in generated),
    }


@lru_cache(maxsize=256)
def _prompt(tokens: int, number: int) -> list[int]:
    return _random_tokens(tokens, f"{tokens} {number}")


def _random_tokens(count: int, seed: str) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(3, VOCABULARY) for _ in range(count)]
