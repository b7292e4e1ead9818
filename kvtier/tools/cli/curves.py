"""``kvtier replay TRACE --policies ...``: hit ratio against capacity, policies alone.

No subcommand of its own: ``replay`` calls ``run_curves`` instead of the player
when ``--policies`` was given. It needs ``arguments.trace``, and what the three
functions of ``kvtier/tools/cli/options.py`` add.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.terminal import progress, table, write_json
from kvtier.tools.cli.trace_input import check_report_options, describe, read_trace_in_sight
from kvtier.tools.replay import curves
from kvtier.tools.replay.pictures import draw_curves

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvtier.tools.replay.curves import CurvePoint, Workload
    from kvtier.tools.replay.traces import Trace

PICTURE: Final = "hit_ratio_by_capacity.png"


def run_curves(arguments: argparse.Namespace) -> int:
    """Print the table, and write the report and the picture if asked. Returns the exit status.

    After Ctrl-C it does so with what it has by then, and says that it is incomplete.
    """
    policies = [*curves.parse_policies(arguments.policies), curves.MIN]
    check_report_options(arguments)
    trace = read_trace_in_sight(arguments.trace, arguments)
    workload = curves.Workload(trace)
    capacities = curves.parse_capacities(arguments.capacities, workload.distinct_blocks)
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
    _report(arguments, trace, workload, capacities, found, complete=complete)
    return 0 if complete else INTERRUPTED


def _report(
    arguments: argparse.Namespace,
    trace: Trace,
    workload: Workload,
    capacities: Sequence[int],
    found: dict[str, list[CurvePoint]],
    *,
    complete: bool,
) -> None:
    shares = [f"{100 * capacity / workload.distinct_blocks:.3g} %" for capacity in capacities]
    table(
        f"Hit ratio of {trace.name}{'' if complete else ' (interrupted: incomplete)'}\n"
        f"{len(trace.requests):,} requests, {trace.references:,} references to "
        f"{trace.distinct_blocks:,} blocks of {trace.block_tokens} tokens; "
        f"an endless cache: {workload.endless_hit_ratio():.4f}",
        ["policy", *shares, "seconds"],
        [
            ["", *(f"{capacity:,}" for capacity in capacities), ""],
            *(_row(policy, points, len(capacities)) for policy, points in found.items()),
        ],
    )
    if arguments.json:
        write_json(arguments.json, _json(trace, workload, found, complete=complete))
        print(f"Figures: {arguments.json}")
    if arguments.pictures and any(found.values()):
        picture = Path(arguments.pictures) / PICTURE
        draw_curves(
            picture,
            f"Hit ratio against capacity: {trace.name}",
            {policy: points for policy, points in found.items() if points},
            distinct_blocks=workload.distinct_blocks,
            block_bytes=getattr(arguments, "block_bytes", None),
        )
        print(f"Picture: {picture}")


def _row(policy: str, points: Sequence[CurvePoint], columns: int) -> list[str]:
    ratios = [f"{point.hit_ratio:.4f}" for point in points]
    seconds = f"{sum(point.seconds for point in points):.1f}"
    return [policy, *ratios, *["-"] * (columns - len(points)), seconds]


def _json(
    trace: Trace, workload: Workload, found: dict[str, list[CurvePoint]], *, complete: bool
) -> dict[str, Any]:
    return {
        "report": "kvtier replay --policies",
        "complete": complete,
        "trace": describe(trace),
        "endless_hit_ratio": workload.endless_hit_ratio(),
        "policies": {
            policy: [
                {
                    "capacity_blocks": point.capacity_blocks,
                    "capacity_share": point.capacity_blocks / workload.distinct_blocks,
                    "hits": point.hits,
                    "hit_ratio": point.hit_ratio,
                    "seconds": point.seconds,
                }
                for point in points
            ]
            for policy, points in found.items()
        },
    }
