"""Runs ``kvtier replay --policies``: hit ratio against capacity, of policies alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.trace_input import describe, read_trace_in_sight
from kvtier.tools.replay import curves
from kvtier.tools.terminal import check_can_write, progress, table, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.tools.cli.options import TraceOptions
    from kvtier.tools.replay.curves import CurvePoint
    from kvtier.tools.replay.traces import Trace


def run_curves(
    trace_file: str,
    reading: TraceOptions,
    policy_names: str,
    capacity_shares: str,
    json_file: str | None,
) -> int:
    """Print the table, and write the report if requested. Returns the exit status.

    After Ctrl-C it prints the results so far, marked as incomplete.
    """
    policies = [*curves.parse_policies(policy_names), curves.MIN]
    if json_file:
        check_can_write(json_file, trace_file)
    trace = read_trace_in_sight(trace_file, reading)
    workload = curves.Workload(trace)
    capacities = curves.parse_capacities(capacity_shares, trace.distinct_blocks)
    found: dict[str, list[CurvePoint]] = {policy: [] for policy in policies}
    complete = False
    try:
        replays = len(policies) * len(capacities)
        with progress("replaying", replays * len(workload.requests)) as bar:
            for policy in policies:
                for capacity in capacities:
                    found[policy].append(curves.replay(workload, policy, capacity, bar.advance))
        complete = True
    except KeyboardInterrupt:
        pass
    endless = workload.endless_hit_ratio()
    table(
        f"Hit ratio of {trace.name}{'' if complete else ' (interrupted: incomplete)'}\n"
        f"{len(trace.requests):,} requests, {trace.references:,} references to "
        f"{trace.distinct_blocks:,} blocks of {trace.block_tokens} tokens; "
        f"an endless cache: {endless:.4f}",
        [
            "policy",
            *(f"{100 * each / trace.distinct_blocks:.3g} %" for each in capacities),
            "seconds",
        ],
        [
            ["", *(f"{capacity:,}" for capacity in capacities), ""],
            *(_row(policy, points, len(capacities)) for policy, points in found.items()),
        ],
    )
    if json_file:
        write_json(json_file, _json(trace, endless, found, complete=complete))
        print(f"Figures: {json_file}")
    return 0 if complete else INTERRUPTED


def _row(policy: str, points: Sequence[CurvePoint], columns: int) -> list[str]:
    ratios = [f"{point.hit_ratio:.4f}" for point in points]
    seconds = f"{sum(point.seconds for point in points):.2f}"
    return [policy, *ratios, *["-"] * (columns - len(points)), seconds]


def _json(
    trace: Trace, endless: float, found: Mapping[str, Sequence[CurvePoint]], *, complete: bool
) -> dict[str, Any]:
    return {
        "report": curves.REPORT,
        "complete": complete,
        "trace": describe(trace),
        "endless_hit_ratio": endless,
        "policies": {
            policy: [
                {
                    **point._asdict(),
                    "capacity_share": point.capacity_blocks / trace.distinct_blocks,
                }
                for point in points
            ]
            for policy, points in found.items()
        },
    }
