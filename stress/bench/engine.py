"""``stress.bench engine``: the real engine with either tiering, in fresh processes, in turns.

Each run starts four engines: one of each kind that computes the prompts and
then serves them from DRAM and from disk, and one of each kind that finds them
on disk after a restart. Output tokens must be the same everywhere, and hits
must have come from where the row says; else there is nothing to compare.

Steps from a lookup to its HIT are counted with managers only: an engine's own steps would blur
them. A step is lookups as vLLM's connector makes them, then the step's end, then the time that the
forward pass of a model takes. Two cases: a new manager over the folder, which has to find out what
is there (both have ``START_S`` for it, much less than an engine's start takes); and the manager
that stored the blocks, after a reset of its primary tier.
"""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_offload.base import LookupResult

from kvtier.errors import InternalError
from kvtier.tools.demo.engine import BLOCK_BYTES, BLOCK_TOKENS
from kvtier.tools.demo.model import DEMO_SHAPE
from kvtier.tools.held_signals import HeldSignals
from kvtier.tools.terminal import progress, table
from stress.bench.harness import (
    RUNS,
    Option,
    Report,
    at_least_one,
    medians,
    orders,
    own_folder,
    ratio,
    ratio_cells,
    start_engine,
)
from stress.bench.sides import (
    KVTIER,
    SIDES,
    VLLM,
    ManagerSide,
    Setup,
    kvtier_tier,
    make_context,
    make_keys,
)
from stress.bench.turns import RequestPlayer, Stopwatch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

OPTIONS: Final = (
    RUNS._replace(default=3),
    Option("--tier", "disk", "kvtier's tier, beside vLLM's fs tier", choices=("disk", "fs")),
    Option("--prompts", 8, "prompts in each phase", at_least_one),
)

PROMPT_TOKENS: Final = 1_000
OUTPUT_TOKENS: Final = 4
LOAD_OUTPUT_TOKENS: Final = 32
STEP_TOKENS_MAX: Final = 2_032  #: that the engine computes at once
ENGINE_BLOCKS: Final = 320  #: of the engine's own KV cache: ten prompts at once
SPARE_PROMPTS: Final = 2  #: room for the warm-up's blocks, and for kvtier's reserve for stores
SPEC_OF: Final = {
    KVTIER: {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "load_policy": "always",  # as vLLM does: it is loading that is compared
        # The weights stay the same: what is on disk is to be found. As vLLM's own side has it.
        "on_reset": "keep",
    },
    VLLM: {
        "spec_name": "VLLMTieringOnCPUSpec",
        "spec_module_path": "stress.bench.sides",
    },
}

COLD, DRAM, DISK, LOAD, RESTARTED = "cold", "DRAM", "disk", "load", "restarted"
FIRST_ENGINE: Final = (COLD, DRAM, DISK, LOAD)
SECOND_ENGINE: Final = (RESTARTED,)
ROWS: Final = (
    ("first token, computed, ms", COLD, "first_token_ms"),
    ("first token, from DRAM, ms", DRAM, "first_token_ms"),
    ("first token, from disk, ms", DISK, "first_token_ms"),
    ("first token, from disk after a restart, ms", RESTARTED, "first_token_ms"),
    ("tokens/s under load", LOAD, "tokens_per_s"),
    ("inside manager calls a step, DRAM hits, us", DRAM, "manager_us_per_step"),
    ("inside manager calls a step, under load, us", LOAD, "manager_us_per_step"),
)

KNOWN: Final = "known"
STEP_ROWS: Final = (
    ("steps from lookup to HIT, from disk", KNOWN, 2),
    ("steps from lookup to HIT, from disk after a restart", RESTARTED, 3),
)
STEP_BLOCKS: Final = 256
STEP_BLOCK_BYTES: Final = 64 << 10
STEP_S: Final = 0.02
STEPS_MAX: Final = 100
START_S: Final = 0.5

EngineRun = dict[str, dict[str, Any]]  #: one side's phases by name


def measure(asked: argparse.Namespace, report: Report) -> None:
    """Run all engines, run by run."""
    turns = orders(SIDES)
    runs: list[dict[str, EngineRun]] = []
    steps: list[dict[str, dict[str, int]]] = []
    with own_folder() as folder, progress("engines", asked.runs * 5) as shown:
        for number in range(asked.runs):
            found: dict[str, EngineRun] = {side: {} for side in SIDES}
            order = next(turns)
            for phases in (FIRST_ENGINE, SECOND_ENGINE):
                for side in order:
                    found[side] |= _run_engine(folder, f"{side}-{number}", side, phases, asked)
                    shown.advance()
            check(found, asked.prompts)
            runs.append(found)
            steps.append(measure_steps(asked.tier))
            shown.advance()
            report |= {"rows": _rows(runs, steps), "runs": runs, "steps": steps}


def _run_engine(
    folder: Path, tier: str, side: str, phases: Sequence[str], asked: argparse.Namespace
) -> EngineRun:
    count = asked.prompts
    cached_prompts = count + count // 2 + SPARE_PROMPTS
    job = {
        "shape": DEMO_SHAPE,
        "sizes": {
            "num_gpu_blocks_override": ENGINE_BLOCKS,
            "max_model_len": STEP_TOKENS_MAX,
            "max_num_batched_tokens": STEP_TOKENS_MAX,
        },
        "times_manager": True,
        "extra_config": {
            **SPEC_OF[side],
            "cpu_bytes_to_use": cached_prompts * -(-PROMPT_TOKENS // BLOCK_TOKENS) * BLOCK_BYTES,
            "secondary_tiers": [
                kvtier_tier(asked.tier, folder / tier)
                if side == KVTIER
                else {"type": "fs", "root_dir": str(folder / tier)}
            ],
        },
    }
    known = [[(f"known {number}", PROMPT_TOKENS)] for number in range(count)]
    new = [[(f"new {number}", PROMPT_TOKENS)] for number in range(count // 2)]
    found = {}
    with start_engine(folder, job) as part:
        part.ask(prompts=[[("warm-up", PROMPT_TOKENS)]], output_tokens=OUTPUT_TOKENS)
        for name in phases:
            is_load = name == LOAD
            # Else one after the other, so that each waits for nothing but its own blocks.
            served = part.ask(
                prompts=[*known, *new] if is_load else known,
                output_tokens=LOAD_OUTPUT_TOKENS if is_load else OUTPUT_TOKENS,
                forget="dram" if name == DISK else "gpu",
                one_by_one=not is_load,
            )
            tokens = (count + count // 2) * (PROMPT_TOKENS + LOAD_OUTPUT_TOKENS)
            found[name] = {
                **served,
                "first_token_ms": 1e3 * statistics.median(served["first_token_s"]),
                "tokens_per_s": tokens / served["seconds"],
            }
        part.ask()  # its end
    return found


def check(found: dict[str, EngineRun], prompts: int) -> None:
    """Raise ``InternalError`` for figures of engines that did not do the same."""
    expected = found[VLLM][COLD]["tokens"]
    whole = prompts * (PROMPT_TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS
    for side, phases in found.items():
        for name, phase in phases.items():
            if name != LOAD and phase["tokens"] != expected:
                raise InternalError(f"{side}, {name}: output tokens differ from vLLM's own, cold")
            cached = 0 if name == COLD else whole
            if phase["cached_tokens"] != cached:
                raise InternalError(
                    f"{side}, {name}: {phase['cached_tokens']} tokens came from the tiers "
                    f"instead of {cached}"
                )


def _rows(
    runs: Sequence[dict[str, EngineRun]], steps: Sequence[dict[str, dict[str, int]]]
) -> list[dict[str, Any]]:
    values = [
        (name, {side: [run[side][phase][figure] for run in runs] for side in SIDES}, "")
        for name, phase, figure in ROWS
    ]
    values += [
        (name, {side: [float(run[case][side]) for run in steps] for side in SIDES}, str(promised))
        for name, case, promised in STEP_ROWS
    ]
    return [
        {"name": name, **medians(of), **ratio(of[KVTIER], of[VLLM]), "promised": promised}
        for name, of, promised in values
    ]


def show(report: Report) -> None:
    """Print the table."""
    options = report["options"]
    table(
        f"real engine, {options['prompts']} prompts of {PROMPT_TOKENS} tokens, "
        f"{len(report['runs'])} runs; on disk: vLLM's fs tier, kvtier's {options['tier']} tier",
        ["", "vLLM", "kvtier", "ratio", "of runs", "promised"],
        [
            [
                row["name"],
                *(f"{row[side]:,.1f}" for side in SIDES),
                *ratio_cells(row)[:2],
                row["promised"],
            ]
            for row in report["rows"]
        ],
    )


def measure_steps(
    tier_type: str, blocks: int = STEP_BLOCKS, block_bytes: int = STEP_BLOCK_BYTES
) -> dict[str, dict[str, int]]:
    """Return the steps of each case for each side; ``tier_type`` is that of kvtier's tier."""
    found: dict[str, dict[str, int]] = {KNOWN: {}, RESTARTED: {}}
    with own_folder() as folder, HeldSignals() as signals:
        setup = Setup(2 * blocks, block_bytes, "lru", folder, tier_type)
        for name in SIDES:
            signals.check()  # not within a manager, which takes locks
            with closing(ManagerSide(name, setup)) as side:
                RequestPlayer(side, Stopwatch()).fill(0, blocks)
                side.reset()
                found[KNOWN][name] = _steps_to_hit(side, blocks)
            with closing(ManagerSide(name, setup)) as side:
                time.sleep(START_S)
                found[RESTARTED][name] = _steps_to_hit(side, blocks)
    return found


def _steps_to_hit(side: ManagerSide, blocks: int) -> int:
    """Look a prefix up until all of it is a HIT. A miss would end the comparison."""
    keys = make_keys(0, blocks)
    context = make_context("reader", keys)
    side.manager.on_new_request(context)
    for step in range(1, STEPS_MAX + 1):
        results = {side.manager.lookup(key, context) for key in keys}
        if LookupResult.MISS in results:
            raise InternalError(f"{side.name}: a block that was stored is a miss")
        if results == {LookupResult.HIT}:
            side.manager.on_request_finished(context)
            return step
        side.step()
        time.sleep(STEP_S)
    raise InternalError(f"{side.name}: no HIT within {STEPS_MAX} steps")
