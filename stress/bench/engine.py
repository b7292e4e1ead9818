"""``stress.bench engine``: the real engine with either tiering, in fresh processes, in turns.

Each run starts four engines: one of each kind that computes the prompts and
then serves them from DRAM and from disk, and one of each kind that finds them
on disk after a restart. Output tokens must be the same everywhere, and hits
must have come from where the row says; else there is nothing to compare.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import InternalError, Misuse
from kvtier.tools.demo.engine import BLOCK_BYTES, BLOCK_TOKENS
from kvtier.tools.terminal import progress, table
from stress.bench.children import run_child
from stress.bench.engine_run import (
    COLD,
    DISK,
    DRAM,
    FIRST_ENGINE,
    LOAD,
    MODEL_TOKENS_MAX,
    RESTARTED,
    SECOND_ENGINE,
)
from stress.bench.engines import ENVIRONMENT, own_engine_id
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
from stress.bench.sides import KVTIER, SIDES, VLLM, kvtier_tier
from stress.bench.steps import KNOWN, STEPS_PROMISED, measure_steps

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from pathlib import Path

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
        found: EngineRun = run_child("stress.bench.engine_run", job, ENVIRONMENT)
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
