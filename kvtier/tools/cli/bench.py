"""Measure tiers on storage of your own, in one go.

``tier`` measures redis, s3 and mooncake tiers beside the plain client library on the
same server, and disk and fs tiers beside plain files on the same disk.
Machines are shared and noisy: quote the ratios, never a time by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.errors import Misuse

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmark and its options."""
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="BENCHMARK")
    tier = kinds.add_parser("tier", help="any tier, beside its plain client or the bare disk")
    tier.add_argument(
        "--tier",
        metavar="JSON",
        action="append",
        required=True,
        help="an entry of secondary_tiers whose server runs, or whose folder is there: redis, s3, "
        "mooncake, disk or fs. What is stored has names of its own and is removed. Repeat it for "
        "several",
    )
    tier.add_argument(
        "--block-bytes",
        metavar="SIZES",
        default="64KiB,1MiB",
        help="block sizes, measured one after the other (default: %(default)s)",
    )
    tier.add_argument(
        "--bytes",
        metavar="SIZE",
        default="256MiB",
        help="bytes that each side moves in one leg, all of which the server has room for "
        "(default: %(default)s)",
    )
    tier.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of runs; figures are their medians (default: %(default)s)",
    )
    tier.add_argument(
        "--protection",
        action="store_true",
        help="measure signed and encrypted blocks as well, with random keys (disk: encrypted ones)",
    )
    tier.add_argument(
        "--compression",
        action="store_true",
        help="measure compressed blocks as well; all sides then move bytes that shrink as keys and "
        "values of a model in bfloat16 do",
    )
    tier.add_argument("--json", metavar="FILE", help="write all figures to FILE, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark; 0 if it could be run, whatever it found."""
    from kvtier.tools.bench.tier_command import run  # noqa: PLC0415 - only if it is asked for
    from kvtier.tools.cli.terminal import check_can_write  # noqa: PLC0415 - as above
    from kvtier.tools.held_signals import terminable  # noqa: PLC0415 - as above

    if arguments.rounds < 1:
        raise Misuse(f"--rounds {arguments.rounds} must be at least 1.")
    if arguments.json:
        check_can_write(arguments.json)
    with terminable():
        run(arguments)
    return 0
