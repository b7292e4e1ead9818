"""Recommend how large each tier should be.

Needs a model: its config.json, or three numbers. With a trace it says what each
size would hit and where the knee is; with prices, how large each tier should be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.tools.cli.options import add_report_options, add_trace_options

if TYPE_CHECKING:
    import argparse

LADDER: Final = "0.5%,1%,2%,3%,5%,7%,10%,15%,20%,25%,30%,40%,50%,70%"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    model = parser.add_argument_group("the model")
    model.add_argument(
        "--model", metavar="PATH", help="the model's config.json, or the folder with it"
    )
    model.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="without --model: the number of layers with attention",
    )
    model.add_argument(
        "--kv-heads", type=int, metavar="N", help="without --model: the KV heads of each layer"
    )
    model.add_argument(
        "--head-dim", type=int, metavar="N", help="without --model: the length of a head"
    )
    model.add_argument(
        "--dtype",
        default="auto",
        metavar="NAME",
        help="data type of the KV cache: bfloat16, fp8, ... (default: the model's)",
    )
    model.add_argument(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="tensor-parallel ranks (default: %(default)s)",
    )
    tiers = parser.add_argument_group("the tiers, fastest first")
    tiers.add_argument(
        "--tiers", metavar="SIZES", help="tiers that you have or plan: dram=64GiB,disk=2TiB"
    )
    tiers.add_argument(
        "--price", metavar="PRICES", help="price of a GiB in each tier: dram=3.5,disk=0.12"
    )
    curve = parser.add_argument_group("the workload")
    curve.add_argument("--trace", metavar="FILE", help="a trace of requests; gzip is recognised")
    curve.add_argument("--policy", metavar="NAME", help="eviction policy (default: the runtime's)")
    curve.add_argument(
        "--capacities",
        metavar="SIZES",
        default=LADDER,
        help="capacities to replay: blocks, or shares of the trace's distinct blocks "
        "(default: %(default)s)",
    )
    add_trace_options(parser)
    add_report_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the recommendation. Returns the exit status."""
    from kvtier.tools.cli.sizing import run_size  # noqa: PLC0415 - only what was asked for

    return run_size(arguments)
