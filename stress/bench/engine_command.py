"""``stress.bench engine``: the real engine with either tiering, in fresh processes, in turns.

Each run starts four engines: one of each kind that computes the prompts and
then serves them from DRAM and from disk, and one of each kind that finds them
on disk after a restart. Output tokens must be the same everywhere, and hits
must have come from where the row says; else there is nothing to compare.
"""

from __future__ import annotations

import statistics
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import InternalError, Misuse
from kvtier.tools.cli.terminal import progress, table, write_json
from kvtier.tools.demo.engine import BLOCK_BYTES, BLOCK_TOKENS
from stress.bench.about import about
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
from stress.bench.leftovers import remove_regions
from stress.bench.sides import KVTIER, SIDES, VLLM, kvtier_tier
from stress.bench.steps import KNOWN, STEPS_PROMISED, measure_steps

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from kvtier.plugin_api.progress import Progress

SPEC_OF: Final = {
    KVTIER: {
        "spec_name": "KVTierOffloadingSpec",
        "spec_module_path": "kvtier.vllm",
        "load_policy": "always",  # as vLLM does: it is loading that is compared
    },
    VLLM: {
        "spec_name": "VLLMTieringOnCPUSpec",
        "spec_module_path": "stress.bench.vllm_spec",
    },
}
ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the phases step the engine themselves
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",  # tiers' threads get the other cores
}
SPARE_PROMPTS: Final = 2  #: room for the warm-up's blocks, and for kvtier's reserve for stores
SEED: Final = 2026
CHILDREN_A_RUN: Final = 2 * len(SIDES)

_Run = dict[str, dict[str, Any]]  #: one side's phases by name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        help="number of runs; figures are their medians (default: %(default)s)",
    )
    parser.add_argument(
        "--tier",
        choices=("disk", "fs"),
        default="disk",
        help="kvtier's tier, beside vLLM's fs tier (default: %(default)s)",
    )
    parser.add_argument(
        "--prompts", type=int, default=8, help="prompts in each phase (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=1_000,
        help="tokens in each prompt (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the table, write the file."""
    tokens = arguments.prompt_tokens
    if not 2 * BLOCK_TOKENS <= tokens <= MODEL_TOKENS_MAX:
        raise Misuse(
            f"--prompt-tokens {tokens} must be between {2 * BLOCK_TOKENS} (two blocks) and "
            f"{MODEL_TOKENS_MAX}, which the model takes."
        )
    runs: list[dict[str, _Run]] = []
    steps: list[dict[str, dict[str, int]]] = []
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder,
        progress("engines", arguments.runs * (CHILDREN_A_RUN + 1)) as shown,
    ):
        for number in range(arguments.runs):
            runs.append(_run_engines(Path(folder), number, arguments, shown))
            steps.append(measure_steps(arguments.tier))
            shown.advance()
    rows = _rows(runs) + _step_rows(steps)
    table(
        f"real engine, {arguments.prompts} prompts of {tokens} tokens, {arguments.runs} runs; "
        f"on disk: vLLM's fs tier, kvtier's {arguments.tier} tier",
        ["", "vLLM", "kvtier", "ratio", "of runs", "promised"],
        [_shown(row) for row in rows],
    )
    if arguments.json:
        names = ("tier", "runs", "prompts", "prompt_tokens")
        options = {name: getattr(arguments, name) for name in names}
        write_json(
            arguments.json,
            {**about(), "options": options, "rows": rows, "runs": runs, "steps": steps},
        )


def _run_engines(
    folder: Path, number: int, arguments: argparse.Namespace, shown: Progress
) -> dict[str, _Run]:
    """Run all engines of one run; who goes first alternates."""
    found: dict[str, _Run] = {side: {} for side in SIDES}
    for phases in (FIRST_ENGINE, SECOND_ENGINE):
        for side in SIDES if number % 2 else SIDES[::-1]:
            found[side] |= _run_engine(folder, f"{side}-{number}", side, phases, arguments)
            shown.advance()
    _check(found, arguments)
    return found


def _run_engine(
    folder: Path, tier: str, side: str, phases: Sequence[str], arguments: argparse.Namespace
) -> _Run:
    engine_id = f"bench-{uuid.uuid4()}"
    prompts = arguments.prompts + arguments.prompts // 2 + SPARE_PROMPTS
    blocks = prompts * -(-arguments.prompt_tokens // BLOCK_TOKENS)
    tiers_folder = folder / tier
    own: dict[str, Any] = {"secondary_tiers": [{"type": "fs", "root_dir": str(tiers_folder)}]}
    if side == KVTIER:
        own = {
            "secondary_tiers": [kvtier_tier(arguments.tier, tiers_folder)],
            # The weights stay the same: what is on disk is to be found. As vLLM's own side has it.
            "on_reset": "keep",
        }
    job = {
        "model": str(folder / "model"),
        "phases": phases,
        "prompts": arguments.prompts,
        "prompt_tokens": arguments.prompt_tokens,
        "seed": SEED,
        "engine_id": engine_id,
        "extra_config": {
            **SPEC_OF[side],
            "cpu_bytes_to_use": blocks * BLOCK_BYTES,
            **own,
        },
    }
    try:
        found: _Run = run_child("stress.bench.engine_run", job, ENVIRONMENT)
    finally:
        remove_regions(engine_id)
    return found


def _check(found: dict[str, _Run], arguments: argparse.Namespace) -> None:
    """Refuse figures of engines that did not do the same."""
    expected = found[VLLM][COLD]["tokens"]
    whole = arguments.prompts * (arguments.prompt_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
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


def _rows(runs: Sequence[dict[str, _Run]]) -> list[dict[str, Any]]:
    def first_token_ms(phase: dict[str, Any]) -> float:
        seconds: list[float] = phase["first_token_s"]
        return statistics.median(seconds) * 1e3

    rows = [
        _row(name, runs, phase, first_token_ms)
        for name, phase in (
            ("first token, computed, ms", COLD),
            ("first token, from DRAM, ms", DRAM),
            ("first token, from disk, ms", DISK),
            ("first token, from disk after a restart, ms", RESTARTED),
        )
    ]
    rows.append(_row("tokens/s under load", runs, LOAD, lambda phase: phase["tokens_per_s"]))
    for name, phase in (("DRAM hits", DRAM), ("under load", LOAD)):
        rows.append(
            _row(
                f"inside manager calls a step, {name}, us",
                runs,
                phase,
                lambda figures: figures["manager_us_per_step"],
            )
        )
    return rows


def _row(
    name: str,
    runs: Sequence[dict[str, _Run]],
    phase: str,
    figure: Callable[[dict[str, Any]], float],
) -> dict[str, Any]:
    values = {side: [figure(run[side][phase]) for run in runs] for side in SIDES}
    return _compared(name, values)


def _step_rows(steps: Sequence[dict[str, dict[str, int]]]) -> list[dict[str, Any]]:
    rows = []
    for case, name in (
        (KNOWN, "steps from lookup to HIT, from disk"),
        (RESTARTED, "steps from lookup to HIT, from disk after a restart"),
    ):
        values = {side: [float(run[case][side]) for run in steps] for side in SIDES}
        rows.append({**_compared(name, values), "promised": STEPS_PROMISED[case]})
    return rows


def _compared(name: str, values: dict[str, list[float]]) -> dict[str, Any]:
    """Return the medians of both sides, their ratio, and how far it strays between runs."""
    ratios = [ours / theirs for ours, theirs in zip(values[KVTIER], values[VLLM], strict=True)]
    medians = {side: statistics.median(values[side]) for side in SIDES}
    return {
        "name": name,
        **medians,
        "ratio": medians[KVTIER] / medians[VLLM],
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "promised": None,
    }


def _shown(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{row[VLLM]:,.1f}",
        f"{row[KVTIER]:,.1f}",
        f"{row['ratio']:.2f}",
        f"{row['ratio_min']:.2f}..{row['ratio_max']:.2f}",
        "" if row["promised"] is None else f"{row['promised']}",
    ]
