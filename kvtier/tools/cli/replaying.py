"""Runs ``kvtier replay`` without ``--policies``: plays a trace, and reports on the run."""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.sizes import read_bytes
from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.trace_input import describe, read_trace_in_sight
from kvtier.tools.replay.engine_model import EngineModel
from kvtier.tools.replay.gpu import Verify
from kvtier.tools.replay.report import build_report, problems_in
from kvtier.tools.replay.report_tables import tables
from kvtier.tools.replay.session import replay
from kvtier.tools.replay.settings import ReplaySettings, read_config_file, read_runtime
from kvtier.tools.terminal import check_can_write, table, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvtier.tools.cli.options import EngineOptions, TierOptions, TraceOptions
    from kvtier.tools.replay.session import Replayed
    from kvtier.tools.replay.traces import Trace

WRONG: Final = 1
"""The exit status if a block was wrong, an actor broke, or a tier failed all of its work."""


def run_replay(
    trace_file: str,
    reading: TraceOptions,
    tiers: TierOptions,
    engine: EngineOptions,
    json_file: str | None,
) -> int:
    """Play the trace and report. Returns the exit status.

    After Ctrl-C or SIGTERM the runtime is closed, folders are removed, and the measurements so far
    are reported as partial.
    """
    if json_file:
        check_can_write(json_file, trace_file, tiers.config)
    model = _model(engine)
    trace = read_trace_in_sight(trace_file, reading)
    settings = _settings(tiers, trace, model, jumps=engine.speed == "max")
    with _stopping() as should_stop:
        replayed = replay(trace, settings, should_stop=should_stop)
    problems = _report(json_file, trace, replayed)
    for problem in problems:
        print(f"kvtier replay: {problem}", file=sys.stderr)
    if problems:
        return WRONG
    return 0 if replayed.played else INTERRUPTED


def _model(engine: EngineOptions) -> EngineModel:
    try:
        speed = 1.0 if engine.speed == "max" else float(engine.speed)
    except ValueError:
        raise ConfigError(f"--speed {engine.speed!r} must be a number, or max.") from None
    return EngineModel(
        prefill_tokens_per_s=engine.prefill_tokens_per_s,
        decode_tokens_per_s=engine.decode_tokens_per_s,
        requests_in_flight_max=engine.requests_in_flight,
        speed=speed,
    )


def _settings(
    given: TierOptions, trace: Trace, model: EngineModel, *, jumps: bool
) -> ReplaySettings:
    block_bytes = read_bytes(given.block_bytes, "--block-bytes")
    if not block_bytes:
        raise ConfigError(f"--block-bytes={given.block_bytes!r} must be at least 1.")
    runtime = read_runtime(
        read_config_file(given.config) if given.config else {},
        dram=given.dram,
        tiers=given.tier,
        policy=given.policy,
        block_bytes=block_bytes,
        distinct_blocks=trace.distinct_blocks,
    )
    return ReplaySettings(
        runtime,
        model,
        jumps=jumps,
        verify=Verify(given.verify),
        keep=given.keep,
    )


def _report(json_file: str | None, trace: Trace, replayed: Replayed) -> list[str]:
    """Print and write the requested reports; return the failures."""
    report = build_report(replayed, describe(trace))
    for warning in report["warnings"]:
        print(f"Warning: {warning}")
    for each in tables(report):
        table(*each)
    if not replayed.played:
        print("Stopped before the end of the trace: the report is partial.")
    if not replayed.closed:
        print("A tier did not end in time when the runtime was closed.", file=sys.stderr)
    if json_file:
        write_json(json_file, report)
        print(f"Figures: {json_file}")
    for folder in replayed.leftovers:
        print(f"Left behind, because it could not be removed: {folder}", file=sys.stderr)
    return problems_in(report)


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Make a function return True after the first SIGINT or SIGTERM; a second one interrupts."""
    stopped = threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("kvtier replay: stopping. Once more: at once, and folders may stay.", file=sys.stderr)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped.is_set
    finally:
        signal.signal(signal.SIGINT, before)
