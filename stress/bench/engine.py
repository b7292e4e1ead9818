"""``stress.bench engine``: the real engine with either tiering, in fresh processes, in turns.

Each run starts four engines: one of each kind that computes the prompts and
then serves them from DRAM and from disk, and one of each kind that finds them
on disk after a restart. Output tokens must be the same everywhere, and hits
must have come from where the row says; else there is nothing to compare.
"""

from __future__ import annotations

import functools
import statistics
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_offload.base import LookupResult

from kvtier.errors import InternalError, Misuse
from kvtier.tools.demo.engine import BLOCK_BYTES, BLOCK_TOKENS, make_prompts
from kvtier.tools.held_signals import HeldSignals
from kvtier.tools.terminal import progress, table
from stress.bench.children import ENVIRONMENT, own_engine_id, run_child
from stress.bench.driven_engine import DrivenEngine
from stress.bench.harness import (
    RUNS,
    SEED,
    Option,
    Report,
    medians,
    orders,
    own_folder,
    ratio,
    spread,
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
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

ENGINE_BLOCKS: Final = 320  #: of the engine's own KV cache: ten prompts of 1,000 tokens at once
MODEL_TOKENS_MAX: Final = 2_000
OUTPUT_TOKENS: Final = 4
LOAD_OUTPUT_TOKENS: Final = 32

COLD, DRAM, DISK, LOAD, RESTARTED = "cold", "DRAM", "disk", "load", "restarted"
FIRST_ENGINE: Final = (COLD, DRAM, DISK, LOAD)
SECOND_ENGINE: Final = (RESTARTED,)

KNOWN: Final = "known"

OPTIONS: Final = (
    RUNS._replace(default=3),
    Option("--tier", "disk", "kvtier's tier, beside vLLM's fs tier", choices=("disk", "fs")),
    Option("--prompts", 8, "prompts in each phase"),
    Option("--prompt-tokens", 1_000, "tokens in each prompt"),
)

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
        "spec_module_path": "stress.bench.vllm_spec",
    },
}
SPARE_PROMPTS: Final = 2  #: room for the warm-up's blocks, and for kvtier's reserve for stores

EngineRun = dict[str, dict[str, Any]]  #: one side's phases by name


def _first_token_ms(phase: dict[str, Any]) -> float:
    return 1e3 * float(statistics.median(phase["first_token_s"]))


def _tokens_per_s(phase: dict[str, Any]) -> float:
    return float(phase["tokens_per_s"])


def _manager_us(phase: dict[str, Any]) -> float:
    return float(phase["manager_us_per_step"])


ROWS: Final = (
    ("first token, computed, ms", COLD, _first_token_ms),
    ("first token, from DRAM, ms", DRAM, _first_token_ms),
    ("first token, from disk, ms", DISK, _first_token_ms),
    ("first token, from disk after a restart, ms", RESTARTED, _first_token_ms),
    ("tokens/s under load", LOAD, _tokens_per_s),
    ("inside manager calls a step, DRAM hits, us", DRAM, _manager_us),
    ("inside manager calls a step, under load, us", LOAD, _manager_us),
)
STEP_ROWS: Final = (
    ("steps from lookup to HIT, from disk", KNOWN),
    ("steps from lookup to HIT, from disk after a restart", RESTARTED),
)


def measure(asked: argparse.Namespace, report: Report) -> None:
    """Run all engines, run by run."""
    tokens = asked.prompt_tokens
    if not 2 * BLOCK_TOKENS <= tokens <= MODEL_TOKENS_MAX:
        raise Misuse(
            f"--prompt-tokens {tokens} must be between {2 * BLOCK_TOKENS} (two blocks) and "
            f"{MODEL_TOKENS_MAX}, which the model takes."
        )
    turns = orders(SIDES)
    runs: list[dict[str, EngineRun]] = []
    steps: list[dict[str, dict[str, int]]] = []
    total = asked.runs * (2 * len(SIDES) + 1)
    with own_folder() as folder, progress("engines", total) as shown:
        for number in range(asked.runs):
            found: dict[str, EngineRun] = {side: {} for side in SIDES}
            order = next(turns)
            for phases in (FIRST_ENGINE, SECOND_ENGINE):
                for side in order:
                    found[side] |= _run_engine(folder, f"{side}-{number}", side, phases, asked)
                    shown.advance()
            check(found, asked)
            runs.append(found)
            steps.append(measure_steps(asked.tier))
            shown.advance()
            report |= {"rows": _rows(runs, steps), "runs": runs, "steps": steps}


def show(report: Report) -> None:
    """Print the table."""
    options = report["options"]
    table(
        f"real engine, {options['prompts']} prompts of {options['prompt_tokens']} tokens, "
        f"{len(report['runs'])} runs; on disk: vLLM's fs tier, kvtier's {options['tier']} tier",
        ["", "vLLM", "kvtier", "ratio", "of runs", "promised"],
        [
            [
                row["name"],
                f"{row[VLLM]:,.1f}",
                f"{row[KVTIER]:,.1f}",
                f"{row['ratio']:.2f}",
                spread([row["ratio_min"], row["ratio_max"]], 2),
                "" if row["promised"] is None else f"{row['promised']}",
            ]
            for row in report["rows"]
        ],
    )


def _run_engine(
    folder: Path, tier: str, side: str, phases: Sequence[str], asked: argparse.Namespace
) -> EngineRun:
    prompts = asked.prompts + asked.prompts // 2 + SPARE_PROMPTS
    blocks = prompts * -(-asked.prompt_tokens // BLOCK_TOKENS)
    with own_engine_id() as engine_id:
        job = {
            "model": str(folder / "model"),
            "phases": phases,
            "prompts": asked.prompts,
            "prompt_tokens": asked.prompt_tokens,
            "seed": SEED,
            "engine_id": engine_id,
            "extra_config": {
                **SPEC_OF[side],
                "cpu_bytes_to_use": blocks * BLOCK_BYTES,
                "secondary_tiers": [
                    kvtier_tier(asked.tier, folder / tier)
                    if side == KVTIER
                    else {"type": "fs", "root_dir": str(folder / tier)}
                ],
            },
        }
        found: EngineRun = run_child(__name__, job, ENVIRONMENT)
    return found


def check(found: dict[str, EngineRun], asked: argparse.Namespace) -> None:
    """Raise ``InternalError`` for figures of engines that did not do the same."""
    expected = found[VLLM][COLD]["tokens"]
    whole = asked.prompts * (asked.prompt_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
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
    rows = [
        _row(name, {side: [figure(run[side][phase]) for run in runs] for side in SIDES})
        for name, phase, figure in ROWS
    ]
    for name, case in STEP_ROWS:
        values = {side: [float(run[case][side]) for run in steps] for side in SIDES}
        rows.append(_row(name, values, STEPS_PROMISED[case]))
    return rows


def _row(name: str, values: dict[str, list[float]], promised: int | None = None) -> dict[str, Any]:
    compared = ratio(values[KVTIER], values[VLLM])
    return {"name": name, **medians(values), **compared, "promised": promised}


# --- One engine of ``stress.bench engine``, in a process of its own: figures of each phase.
#
# The engine core runs in this process, so that phases can be told apart and manager calls be timed.
#


TIMED_CALLS: Final = (
    "on_new_request",
    "lookup",
    "get_load_source",
    "prepare_load",
    "complete_load",
    "touch",
    "prepare_store",
    "complete_store",
    "on_request_finished",
    "on_schedule_end",
    "has_pending_work",
    "get_stats",
)


def main(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the phases of a job, by name."""
    tokens_max = MODEL_TOKENS_MAX + LOAD_OUTPUT_TOKENS
    engine = DrivenEngine(
        job,
        num_gpu_blocks_override=ENGINE_BLOCKS,
        max_model_len=tokens_max,
        max_num_batched_tokens=tokens_max,
    )
    timer = CallTimer(engine.manager)
    count, tokens, seed = job["prompts"], job["prompt_tokens"], job["seed"]
    engine.generate(make_prompts(1, tokens, seed + 1), OUTPUT_TOKENS)  # the engine's warm-up
    known = make_prompts(count, tokens, seed)
    new = make_prompts(count // 2, tokens, seed + 2)
    found = {}
    for name in job["phases"]:
        engine.forget(dram_too=name == DISK)
        timer.restart()
        measured = _under_load(engine, [*known, *new]) if name == LOAD else _alone(engine, known)
        found[name] = {**measured, **timer.figures()}
        engine.settle()
    engine.close()
    yield found


def _alone(engine: DrivenEngine, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Run prompts one after the other, so that each waits for nothing but its own blocks."""
    generated = [engine.generate([prompt], OUTPUT_TOKENS)[0] for prompt in prompts]
    return {
        "tokens": [each.tokens for each in generated],
        "cached_tokens": sum(each.cached_tokens for each in generated),
        "first_token_s": [each.first_token_s for each in generated],
    }


def _under_load(engine: DrivenEngine, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Run all prompts at once; none is in the engine's own cache."""
    started = time.perf_counter()
    generated = engine.generate(prompts, LOAD_OUTPUT_TOKENS)
    seconds = time.perf_counter() - started
    tokens = sum(map(len, prompts)) + sum(len(each.tokens) for each in generated)
    return {
        "cached_tokens": sum(each.cached_tokens for each in generated),
        "tokens_per_s": tokens / seconds,
    }


class CallTimer:
    """Adds up the time spent inside a manager's methods, and counts steps.

    ``take_events`` is not among them: it is a generator in vLLM's manager.
    """

    def __init__(self, manager: Any) -> None:  # noqa: ANN401 - either manager
        self._spent_ns: dict[str, int] = {}
        self._calls = 0
        self._steps = 0
        self.restart()
        for name in TIMED_CALLS:
            setattr(manager, name, self._timed(name, getattr(manager, name)))

    def restart(self) -> None:
        """Begin anew."""
        self._spent_ns = dict.fromkeys(TIMED_CALLS, 0)
        self._calls = self._steps = 0

    def figures(self) -> dict[str, Any]:
        """Return what was spent and called since the last restart."""
        steps = max(1, self._steps)
        spent_us = {name: ns / 1e3 for name, ns in self._spent_ns.items()}
        return {
            "steps": self._steps,
            "manager_us": spent_us,
            "manager_us_per_step": sum(spent_us.values()) / steps,
            "manager_calls_per_step": self._calls / steps,
        }

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        ends_step = name == "on_schedule_end"

        @functools.wraps(method)
        def timed(*arguments: object, **named: object) -> object:
            started = time.perf_counter_ns()
            try:
                return method(*arguments, **named)
            finally:
                self._spent_ns[name] += time.perf_counter_ns() - started
                self._calls += 1
                self._steps += ends_step

        return timed


# --- How many scheduler steps pass from the first lookup of a prefix on disk to its HIT.
#
# Managers only, vLLM's with its ``fs`` tier: an engine's own steps would blur it.
# A step is lookups as vLLM's connector makes them, then the step's end, then the
# time that the forward pass of a model takes. Two cases:
#
# - *restarted*: a new manager over the folder, which has to find out what is there
#   (both have ``START_S`` for it, much less than an engine's start takes);
# - *known*: the manager that stored the blocks, after a reset of its primary tier.
#


STEP_BLOCKS: Final = 256
STEP_BLOCK_BYTES: Final = 64 << 10
STEP_S: Final = 0.02
START_S: Final = 0.5
STEPS_MAX: Final = 100
STEPS_PROMISED: Final = {KNOWN: 2, RESTARTED: 3}


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
    keys = make_keys(0, blocks)
    context = make_context("reader", keys)
    side.manager.on_new_request(context)
    for step in range(1, STEPS_MAX + 1):
        if _is_hit(side, keys, context):
            side.manager.on_request_finished(context)
            return step
        side.step()
        time.sleep(STEP_S)
    raise InternalError(f"{side.name}: no HIT within {STEPS_MAX} steps")


def _is_hit(side: ManagerSide, keys: list[bytes], context: object) -> bool:
    """Look a prefix up as vLLM's connector does; a miss would end the comparison."""
    is_hit = True
    for key in keys:
        result = side.manager.lookup(key, context)
        if result is LookupResult.MISS:
            raise InternalError(f"{side.name}: a block that was stored is a miss")
        is_hit = is_hit and result is LookupResult.HIT
    return is_hit
