"""``stress.bench compression``: runs the measurements, and prints and writes what they found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.errors import Misuse
from kvtier.plugin_api.sizes import read_bytes
from kvtier.tools.bench.about import about_machine
from kvtier.tools.bench.kv_like import kv_like
from kvtier.tools.cli.terminal import progress, table, write_json
from stress.bench.compression import (
    LINKS_MB_PER_S,
    THREADS,
    blocks_of_folder,
    measure,
    ways_count,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from stress.bench.compression import CompressionFigures

_MADE_UP: Final = "made-up keys and values in bfloat16"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--folder",
        metavar="PATH",
        help="root_dir of an fs tier, without compression or encryption, with blocks of the model "
        "that is asked about. By default, made-up keys and values in bfloat16 are compressed",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=24,
        help="blocks that are compressed (default: %(default)s)",
    )
    parser.add_argument(
        "--block-bytes",
        metavar="SIZE",
        default="1MiB",
        help="size of the made-up blocks (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of runs; figures are their medians (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure, print tables, write the file."""
    blocks, origin = _blocks(arguments)
    size = sum(block.nbytes for block in blocks)
    with progress("compression", arguments.rounds * ways_count()) as shown:
        found = measure(blocks, arguments.rounds, shown.advance)
    _print_figures(found)
    notes = [
        ["blocks", f"{len(blocks)} of {blocks[0].nbytes:,} bytes: {origin}"],
        ["MB/s", "of uncompressed bytes, by one thread's processor time"],
        ["gain", "in MB/s, while some threads compress and others send"],
    ]
    table("", ["", ""], notes)
    if arguments.json:
        report = {**about_machine(), "origin": origin, "bytes": size, "blocks": len(blocks)}
        write_json(arguments.json, {**report, "figures": [each.to_json() for each in found]})


def _blocks(arguments: argparse.Namespace) -> tuple[list[memoryview], str]:
    if arguments.folder:
        return blocks_of_folder(arguments.folder, arguments.blocks), arguments.folder
    size = read_bytes(arguments.block_bytes, "--block-bytes")
    if size < 2 or size % 2:
        raise Misuse(f"--block-bytes {size} must be even: floats of 16 bits are compressed.")
    return [memoryview(kv_like(size, seed)) for seed in range(arguments.blocks)], _MADE_UP


def _print_figures(found: Sequence[CompressionFigures]) -> None:
    columns = ["", "ratio", "compress, MB/s", "CPU s a GB", "decompress, MB/s", "CPU s a GB"]
    rows = [
        [
            each.way,
            f"{each.ratio:.3f}",
            f"{each.store_mb_per_s:,.0f}",
            f"{1e3 / each.store_mb_per_s:.2f}",
            f"{each.load_mb_per_s:,.0f}",
            f"{1e3 / each.load_mb_per_s:.2f}",
        ]
        for each in found
    ]
    table("compressed, losslessly", columns, rows)
    tiers_own = found[0]
    speeds = (("store", tiers_own.store_mb_per_s), ("load", tiers_own.load_mb_per_s))
    gains = [
        [f"{kind}, {link:,} MB/s"]
        + [f"{tiers_own.gain(speed, link, threads):.2f}" for threads in THREADS]
        for link in LINKS_MB_PER_S
        for kind, speed in speeds
    ]
    threads = [f"gain, {count} thread{'s' * (count > 1)}" for count in THREADS]
    table(f"{tiers_own.way} in front of a link", ["", *threads], gains)
