"""``python -m stress.bench NAME``: measure kvtier, by itself or beside vLLM's own tiering.

Machines are shared and noisy: quote the ratios, never a time by itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import structlog

from kvtier.errors import Misuse
from kvtier.tools.cli.exit_status import BAD_INPUT, INTERRUPTED
from kvtier.tools.held_signals import terminable
from stress.bench.harness import run_benchmark

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHMARKS: Final = {
    "ops": "scheduler-thread time of each call, beside vLLM's manager in the same process",
    "engine": "the real vLLM engine on the CPU, with either tiering",
    "decide": "whether loading or computing is chosen well, in the real engine",
    "lmcache": "the real vLLM engine on the CPU, with kvtier or with LMCache's server",
    "disk": "the disk and fs tiers beside vLLM's fs tier, LMCache, fio and the bare disk",
    "start": "how long a start waits for kvtier",
    "compression": "how much compressing blocks saves, and costs",
}
ENVIRONMENT: Final = {
    # Keeps vLLM from filling the terminal, and from asking the network.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine's core runs in its part
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",  # tiers' threads get the other cores
}
"""Of the benchmark and its parts; vLLM reads it when it is imported."""

OF_VLLM: Final = ("ops", "engine", "decide", "disk", "lmcache")


def main(given: Sequence[str] | None = None) -> int:
    """Run one benchmark and return the exit status: 0 if it could be run, whatever it found."""
    chosen = argparse.ArgumentParser(
        prog="python -m stress.bench",
        description="; ".join(f"{name}: {purpose}" for name, purpose in BENCHMARKS.items()),
        epilog="NAME --help shows the options of one",
    )
    chosen.add_argument("name", choices=BENCHMARKS, metavar="NAME")
    chosen.add_argument("options", nargs=argparse.REMAINDER)
    name, options = vars(chosen.parse_args(given)).values()
    prog = f"{chosen.prog} {name}"
    if name in OF_VLLM and find_spec("vllm") is None:
        print(f"{prog}: vLLM is not installed: see requirements/engine-cpu.txt", file=sys.stderr)
        return BAD_INPUT
    try:
        with terminable():
            run_benchmark(f"stress.bench.{name}", prog, options)
    except Misuse as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    sys.exit(main())
