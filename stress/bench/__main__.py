"""``python -m stress.bench NAME``: measure kvtier, by itself or beside vLLM's own tiering.

Machines are shared and noisy: quote the ratios, never a time by itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from kvtier.errors import Misuse
from kvtier.tools.cli.exit_status import BAD_INPUT, INTERRUPTED
from kvtier.tools.cli.terminal import check_can_write
from kvtier.tools.held_signals import terminable

if TYPE_CHECKING:
    from collections.abc import Sequence

BENCHMARKS: Final = {
    "ops": "scheduler-thread time of each call, beside vLLM's manager in the same process",
    "engine": "the real vLLM engine on the CPU, with either tiering",
    "decide": "whether loading or computing is chosen well, in the real engine",
    "disk": "the disk and fs tiers beside vLLM's fs tier, LMCache, fio and the bare disk",
    "start": "how long a start waits for kvtier",
    "compression": "how much compressing blocks saves, and costs",
}
AT_LEAST_ONE: Final = ("runs", "blocks", "request_blocks", "prompts", "prompt_tokens", "rounds")

NO_VLLM: Final = (
    "this compares kvtier with vLLM, which is not installed. Install it with: "
    "pip install 'vllm>=0.32,<0.34'. Without a GPU: "
    "pip install --no-deps -r requirements/engine-cpu.txt"
)


def main(given: Sequence[str] | None = None) -> int:
    """Run one benchmark and return the exit status: 0 if it could be run, whatever it found."""
    # Before vLLM is imported: it reads them then.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    chosen = argparse.ArgumentParser(
        prog="python -m stress.bench",
        description="; ".join(f"{name}: {purpose}" for name, purpose in BENCHMARKS.items()),
        epilog="NAME --help shows the options of one",
    )
    chosen.add_argument("name", choices=BENCHMARKS, metavar="NAME")
    chosen.add_argument("options", nargs=argparse.REMAINDER)
    name, options = vars(chosen.parse_args(given)).values()
    prog = f"{chosen.prog} {name}"
    try:
        _run(name, prog, options)
    except Misuse as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return BAD_INPUT
    except ModuleNotFoundError:
        if find_spec("vllm") is not None:
            raise
        print(f"{prog}: {NO_VLLM}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _run(name: str, prog: str, options: Sequence[str]) -> None:
    command = import_module(f"stress.bench.{name}_command")
    parser = argparse.ArgumentParser(prog, description=command.__doc__)
    command.add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE, as JSON")
    arguments = parser.parse_args(options)
    _check(arguments)
    with terminable():
        command.run(arguments)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what can't be measured, before anything is started."""
    for name in AT_LEAST_ONE:
        value = getattr(arguments, name, 1)
        if value < 1:
            raise Misuse(f"--{name.replace('_', '-')} {value} must be at least 1.")
    if arguments.json:
        check_can_write(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
