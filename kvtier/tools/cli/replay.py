"""Play a trace of requests through the real runtime, on real tiers, and check every byte.

Prompts arrive as in the trace, are looked up, loaded, computed and stored as an
engine would; computing takes the stated time and nothing else. With --policies,
only eviction policies are compared, without the runtime.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.sizes import read_bytes
from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.options import add_curve_options, add_report_options, add_trace_options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.tools.replay.engine_model import EngineModel
    from kvtier.tools.replay.session import Replayed
    from kvtier.tools.replay.settings import ReplaySettings
    from kvtier.tools.replay.traces import Trace

BLOCK_BYTES: Final = 16 * 1024

WRONG: Final = 1
"""The exit status if a block was wrong, an actor broke, or a tier failed all that it was given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("trace", metavar="TRACE", help="the trace; gzip is recognised")
    add_trace_options(parser)
    _add_tier_options(parser)
    _add_engine_options(parser)
    add_report_options(parser)
    add_curve_options(parser)


def _add_tier_options(parser: argparse.ArgumentParser) -> None:
    tiers = parser.add_argument_group("tiers")
    tiers.add_argument(
        "--config",
        metavar="FILE",
        help="kv_connector_extra_config as JSON, as vLLM gets it; what surrounds it is ignored",
    )
    tiers.add_argument(
        "--dram",
        metavar="SIZE",
        help="the primary tier: 2GiB, or a share of the trace's distinct blocks such as 5%%",
    )
    tiers.add_argument(
        "--tier",
        action="append",
        default=[],
        metavar="TIER",
        help="a secondary tier: disk:FOLDER:SIZE, fs:FOLDER, memory:SIZE, or an entry of "
        "secondary_tiers as JSON; may be given several times",
    )
    tiers.add_argument(
        "--policy",
        metavar="NAME",
        help="eviction policy of the primary tier, and of tiers with a capacity",
    )
    tiers.add_argument(
        "--block-bytes",
        type=_block_bytes,
        metavar="SIZE",
        help="bytes in one block of the trace (default: 16KiB)",
    )
    tiers.add_argument(
        "--keep",
        action="store_true",
        help="keep the tiers' folders at the end, and accept folders that hold blocks",
    )
    tiers.add_argument(
        "--verify",
        choices=("full", "head", "off"),
        default="full",
        help="what is compared of what is read: every byte, the first 4 KiB of each block, or "
        "nothing (default: %(default)s)",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("the stated engine")
    engine.add_argument(
        "--prefill-tokens-per-s",
        type=float,
        default=100_000.0,
        metavar="N",
        help="how fast prompts are computed, one at a time (default: %(default)s)",
    )
    engine.add_argument(
        "--decode-tokens-per-s",
        type=float,
        default=50.0,
        metavar="N",
        help="how fast each request in flight gets its output (default: %(default)s)",
    )
    engine.add_argument(
        "--requests-in-flight",
        type=int,
        default=128,
        metavar="N",
        help="requests in flight at most; more than these wait (default: %(default)s)",
    )
    engine.add_argument(
        "--speed",
        default="max",
        metavar="N",
        help="play arrivals and computing N times as fast, in real time; "
        "max skips the time in which only computing goes on (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Play the trace and report. Returns the exit status.

    After Ctrl-C or SIGTERM the runtime is closed, folders are removed, and
    what was measured so far is reported as partial.
    """
    if arguments.policies:
        from kvtier.tools.cli.curves import run_curves  # noqa: PLC0415 - only what was asked for

        return run_curves(arguments)
    if arguments.pictures:
        raise ConfigError("--pictures needs --policies. What a replay measures is in --json.")
    from kvtier.tools.cli.terminal import progress  # noqa: PLC0415 - heavy imports stay out of other runs
    from kvtier.tools.cli.trace_input import (  # noqa: PLC0415 - as above
        check_report_options,
        read_trace_in_sight,
    )
    from kvtier.tools.replay.session import replay  # noqa: PLC0415 - as above

    check_report_options(arguments)
    model, jumps = _engine(arguments)
    trace = read_trace_in_sight(arguments.trace, arguments)
    settings = _settings(arguments, trace, model, jumps=jumps)
    with _stopping() as should_stop:
        replayed = replay(trace, settings, should_stop=should_stop, progress=progress)
    problems = _report(arguments, trace, replayed)
    for problem in problems:
        print(f"kvtier replay: {problem}", file=sys.stderr)
    if problems:
        return WRONG
    return 0 if replayed.played else INTERRUPTED


def _block_bytes(text: str) -> int:
    try:
        size = read_bytes(text, "--block-bytes")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 1:
        raise argparse.ArgumentTypeError(f"--block-bytes={text!r} must be at least 1.")
    return size


def _engine(arguments: argparse.Namespace) -> tuple[EngineModel, bool]:
    """Return the stated engine, and whether the clock may jump."""
    from kvtier.tools.replay.engine_model import EngineModel  # noqa: PLC0415 - as in run

    jumps = arguments.speed == "max"
    try:
        speed = 1.0 if jumps else float(arguments.speed)
    except ValueError:
        raise ConfigError(f"--speed {arguments.speed!r} must be a number, or max.") from None
    model = EngineModel(
        prefill_tokens_per_s=arguments.prefill_tokens_per_s,
        decode_tokens_per_s=arguments.decode_tokens_per_s,
        requests_in_flight_max=arguments.requests_in_flight,
        speed=speed,
    )
    return model, jumps


def _settings(
    arguments: argparse.Namespace, trace: Trace, model: EngineModel, *, jumps: bool
) -> ReplaySettings:
    from kvtier.tools.replay import settings  # noqa: PLC0415 - as in run
    from kvtier.tools.replay.gpu import Verify  # noqa: PLC0415 - as in run

    runtime = settings.read_runtime(
        settings.read_config_file(arguments.config) if arguments.config else {},
        dram=arguments.dram,
        tiers=arguments.tier,
        policy=arguments.policy,
        block_bytes=arguments.block_bytes or BLOCK_BYTES,
        distinct_blocks=trace.distinct_blocks,
    )
    return settings.ReplaySettings(
        runtime=runtime,
        model=model,
        jumps=jumps,
        verify=Verify(arguments.verify),
        keep=arguments.keep,
    )


def _report(arguments: argparse.Namespace, trace: Trace, replayed: Replayed) -> list[str]:
    """Print and write what was asked for; return what must never be."""
    from kvtier.tools.cli.terminal import table, write_json  # noqa: PLC0415 - as in run
    from kvtier.tools.cli.trace_input import describe  # noqa: PLC0415 - as in run
    from kvtier.tools.replay.report import build_report, problems_in  # noqa: PLC0415 - as in run
    from kvtier.tools.replay.report_tables import tables  # noqa: PLC0415 - as in run

    report = build_report(replayed, describe(trace))
    for warning in report["warnings"]:
        print(f"Warning: {warning}")
    for each in tables(report):
        table(each.title, each.columns, each.rows)
    if not replayed.played:
        print("Stopped before the end of the trace: the report is partial.")
    if not replayed.closed:
        print("A tier did not end in time when the runtime was closed.", file=sys.stderr)
    if arguments.json:
        write_json(arguments.json, report)
        print(f"Figures: {arguments.json}")
    for folder in replayed.leftovers:
        print(f"Left behind, because it could not be removed: {folder}", file=sys.stderr)
    return problems_in(report)


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT or SIGTERM into a yes; a second SIGINT interrupts as usual."""
    stopped = threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("kvtier replay: stopping. Once more: at once, and folders may stay.", file=sys.stderr)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
