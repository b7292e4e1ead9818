"""``stress.bench ops``: runs the measurements, and prints and writes what they found."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import Misuse
from kvtier.settings.plugins import make_policy
from kvtier.tools.cli.terminal import check_can_write, progress, table, write_json
from stress.bench.about import about
from stress.bench.children import run_child
from stress.bench.ops import LRU_FACTOR_MAX, OpsOptions, measure
from stress.bench.picture import draw_scale
from stress.bench.sides import KVTIER, SIDES, VLLM
from stress.bench.turns import BOUND_OF

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

SCALE_REQUEST_BLOCKS: Final = 128  #: the same at every size, and a tenth of the smallest
SCALE_SAMPLES: Final = 150
BLOCK_BYTES_MAX: Final = 400  #: of memory for each resident block, everything included
GC_PAUSE_MS_MAX: Final = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--blocks", type=int, default=20_000, help="blocks that are resident (default: %(default)s)"
    )
    parser.add_argument(
        "--request-blocks",
        type=int,
        default=512,
        help="blocks in each request (default: %(default)s)",
    )
    parser.add_argument(
        "--policies",
        default="lru",
        help="eviction policies of kvtier to measure, e.g. lru,reuse (default: %(default)s)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=5,
        help="number of runs; figures are their medians (default: %(default)s)",
    )
    parser.add_argument(
        "--secondary-tiers",
        type=int,
        choices=(0, 1),
        default=0,
        help="1 gives both sides an fs tier, which is idle while calls are timed (default: 0)",
    )
    parser.add_argument(
        "--self-describing-events",
        action="store_true",
        help="measure kvtier as with vLLM's self_describing_kv_events",
    )
    parser.add_argument(
        "--scale",
        metavar="N,N,...",
        help="measure the cost of a key at each number of resident blocks: 1e3,1e4,1e5,1e6",
    )
    parser.add_argument("--picture", metavar="FILE.png", help="plot what --scale measures")


def run(arguments: argparse.Namespace) -> None:
    """Measure, print tables, write files."""
    if arguments.picture:
        _check_picture(arguments)
    policies = _policies(arguments.policies)
    options = OpsOptions(
        blocks=arguments.blocks,
        request_blocks=min(arguments.request_blocks, arguments.blocks),
        runs=arguments.runs,
        with_tier=bool(arguments.secondary_tiers),
        self_describing=arguments.self_describing_events,
    )
    sizes = _sizes(arguments.scale)
    report: dict[str, Any] = {**about(), "options": asdict(options), "policies": [], "scale": []}
    for policy in policies:
        with progress(f"calls, {policy}", options.runs + 1) as shown:
            figures = measure(options, policy, shown.advance)
        report["policies"].append(figures)
        _print_calls(figures, report["policies"][0], options.runs)
    for size in sizes:
        at_size = OpsOptions(
            size, min(SCALE_REQUEST_BLOCKS, size), options.runs, samples=SCALE_SAMPLES
        )
        for policy in policies:
            with progress(f"calls at {size:,} blocks, {policy}", options.runs + 1) as shown:
                report["scale"].append(measure(at_size, policy, shown.advance))
    if sizes:
        for policy in policies:
            _print_scale([point for point in report["scale"] if point["policy"] == policy])
    report["memory"] = [
        _weigh(policy, max([*sizes, options.blocks]), options.request_blocks) for policy in policies
    ]
    for weighed in report["memory"]:
        _print_memory(weighed)
    if arguments.json:
        write_json(arguments.json, report)
    if arguments.picture:
        draw_scale(report["scale"], arguments.picture)


def _check_picture(arguments: argparse.Namespace) -> None:
    """Refuse a picture that could not be drawn, better now than after the work."""
    if not arguments.scale:
        raise Misuse("--picture draws what --scale measures: give both.")
    check_can_write(arguments.picture)
    if find_spec("matplotlib") is None:
        raise Misuse("the picture needs matplotlib. Install it with: pip install matplotlib")


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise Misuse("--policies names none. Give one at least, e.g. lru.")
    for name in names:
        make_policy(name, 1)  # an unknown one is refused before the first run
    return names


def _sizes(text: str | None) -> list[int]:
    try:
        sizes = [int(float(word)) for word in (text or "").split(",") if word.strip()]
    except (ValueError, OverflowError):
        raise Misuse(f"--scale {text!r} must be numbers of blocks: 1e3,1e4,1e5,1e6.") from None
    if any(size < 1 for size in sizes):
        raise Misuse(f"--scale {text!r}: every number must be at least 1.")
    return sizes


def _weigh(policy: str, blocks: int, request_blocks: int) -> dict[str, Any]:
    """Return each side's memory and pauses, measured in a process of its own."""
    weighed: dict[str, Any] = {"policy": policy}
    with progress(f"memory and pauses at {blocks:,} blocks, {policy}", len(SIDES)) as shown:
        for side in SIDES:
            job = {
                "side": side,
                "policy": policy,
                "blocks": blocks,
                "request_blocks": request_blocks,
            }
            weighed[side] = run_child("stress.bench.resident", job, {})
            shown.advance()
    ours = weighed[KVTIER]
    weighed["bytes_hold"] = ours["traced_bytes_per_block"] <= BLOCK_BYTES_MAX
    weighed["gc_holds"] = ours["gc_longest_ms"] <= GC_PAUSE_MS_MAX
    return weighed


def _print_calls(figures: dict[str, Any], first: dict[str, Any], runs: int) -> None:
    beside_first = figures is not first
    rows = []
    for name, call in figures["calls"].items():
        row = [
            name if call["unit"] == "ns/key" else f"{name} (a call)",
            f"{call[VLLM]['median_ns']:,.0f}",
            f"{call[VLLM]['p99_ns']:,.0f}",
            f"{call[KVTIER]['median_ns']:,.0f}",
            f"{call[KVTIER]['p99_ns']:,.0f}",
            f"{call['ratio']:.2f}",
            f"{call['ratio_min']:.2f}..{call['ratio_max']:.2f}",
            "" if call["bound"] is None else f"{call['bound']:.2f}",
            _yes_or_no(call["holds"]),
        ]
        if beside_first:
            times = call[KVTIER]["median_ns"] / first["calls"][name][KVTIER]["median_ns"]
            row.append(f"{times:.2f}")
        rows.append(row)
    columns = ["ns a key", "vLLM", "p99", "kvtier", "p99", "ratio", "of runs", "bound", "holds"]
    if beside_first:
        columns.append(f"x {first['policy']} (max {LRU_FACTOR_MAX:.0f})")
    table(
        f"{figures['policy']} beside vLLM's {figures['vllm_policy']}: "
        f"{figures['blocks']:,} blocks, {runs} runs",
        columns,
        rows,
    )


def _print_scale(points: Sequence[dict[str, Any]]) -> None:
    rows = []
    for name in BOUND_OF:
        calls = [point["calls"][name] for point in points if name in point["calls"]]
        if not calls:
            continue
        for side in SIDES:
            medians = [call[side]["median_ns"] for call in calls]
            rows.append(
                [
                    f"{name}: {side}",
                    *(f"{median:,.0f}" for median in medians),
                    f"{medians[-1] / medians[0]:.2f}",
                ]
            )
        rows.append([f"{name}: ratio", *(f"{call['ratio']:.2f}" for call in calls), ""])
    table(
        f"{points[0]['policy']}: ns a key (calls of a step: ns a call) by resident blocks",
        ["", *(f"{point['blocks']:,}" for point in points), "last / first"],
        rows,
    )


def _print_memory(weighed: dict[str, Any]) -> None:
    theirs, ours = weighed[VLLM], weighed[KVTIER]
    rows: list[list[str]] = [
        [
            "bytes a block (allocated)",
            f"{theirs['traced_bytes_per_block']:.0f}",
            f"{ours['traced_bytes_per_block']:.0f}",
            str(BLOCK_BYTES_MAX),
            _yes_or_no(weighed["bytes_hold"]),
        ],
        [
            "bytes a block (growth of the process)",
            f"{theirs['rss_bytes_per_block']:.0f}",
            f"{ours['rss_bytes_per_block']:.0f}",
            "",
            "",
        ],
        [
            "longest garbage collection, ms",
            f"{theirs['gc_longest_ms']:.2f}",
            f"{ours['gc_longest_ms']:.2f}",
            f"{GC_PAUSE_MS_MAX:.0f}",
            _yes_or_no(weighed["gc_holds"]),
        ],
    ]
    rows += [
        [
            f"longest {name}, ms",
            *(f"{each['call_longest_us'][name] / 1e3:.2f}" for each in (theirs, ours)),
        ]
        for name in ours["call_longest_us"]
    ]
    table(
        f"{weighed['policy']}: {ours['blocks']:,} blocks, each side alone (times: CPU)",
        ["", "vLLM", "kvtier", "bound", "holds"],
        [[*row, *[""] * (5 - len(row))] for row in rows],
    )


def _yes_or_no(holds: bool | None) -> str:  # noqa: FBT001 - a figure, not a switch
    return "" if holds is None else "yes" if holds else "NO"
