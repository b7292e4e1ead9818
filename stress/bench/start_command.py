"""``stress.bench start``: fills a folder, starts over it again and again, prints what that took.

Or makes an engine's host memory again and again.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import Misuse, StoreFault
from kvtier.plugin_api.sizes import read_bytes
from kvtier.tools.bench.about import about_machine
from kvtier.tools.bench.tier_command import check_pages
from kvtier.tools.cli.terminal import progress, table, write_json
from stress.bench.asked import add_path, asked_folder
from stress.bench.children import run_child
from stress.bench.start import SLOTS, STEP_S, runtime_of, told_of_tiers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from kvtier.engine.facade import SchedulerFacade
    from kvtier.plugin_api.progress import Progress

GIB: Final = 1 << 30
KEY_BYTES: Final = 36
ROOM_SHARE: Final = 1.25
ROOM_BYTES: Final = 64 << 20
"""What the folder has room for, beside what is put into it: all of it is there at the start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_path(parser)
    parser.add_argument(
        "--blocks",
        type=int,
        default=1_000_000,
        help="blocks in the folder of the disk tier (default: %(default)s)",
    )
    parser.add_argument(
        "--block-bytes", metavar="SIZE", default="4KiB", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=5,
        help="number of starts; figures are their medians (default: %(default)s)",
    )
    parser.add_argument(
        "--region",
        metavar="SIZE",
        help="measure host memory of this size instead, as an engine on the CPU makes it",
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the tables, write the file."""
    if arguments.region is None:
        _run_blocks(arguments)
    else:
        _run_region(arguments)


def _run_region(arguments: argparse.Namespace) -> None:
    size = read_bytes(arguments.region, "--region")
    if size < GIB:
        raise Misuse(f"--region {arguments.region} must be at least 1GiB.")
    with progress("starting", arguments.runs) as shown:
        runs = []
        for _ in range(arguments.runs):
            runs.append(run_child("stress.bench.region", {"region_bytes": size}, {}))
            shown.advance()
    _print(runs, f"host memory of {size / GIB:g} GiB on the CPU")
    if arguments.json:
        write_json(arguments.json, {**about_machine(), "region_bytes": size, "runs": runs})


def _run_blocks(arguments: argparse.Namespace) -> None:
    block_bytes = read_bytes(arguments.block_bytes, "--block-bytes")
    check_pages(block_bytes)
    place = asked_folder(arguments.path)
    blocks = arguments.blocks
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=place) as folder:
        tier = {
            "type": "disk",
            "path": folder,
            "enable_kv_events": True,
            "capacity_bytes": int(blocks * block_bytes * ROOM_SHARE) + ROOM_BYTES,
        }
        with progress("filling the folder", blocks) as shown:
            fill(tier, block_bytes, blocks, shown)
        job = {"tiers": [tier], "block_bytes": block_bytes, "blocks": blocks}
        with progress("starting", arguments.runs) as shown:
            runs = []
            for _ in range(arguments.runs):
                runs.append(run_child("stress.bench.start", job, {}))
                shown.advance()
    _print(runs, f"a start over a disk tier of {blocks:,} blocks")
    if arguments.json:
        write_json(arguments.json, {**about_machine(), "blocks": blocks, "runs": runs})


def fill(tier: Mapping[str, Any], block_bytes: int, blocks: int, shown: Progress) -> None:
    """Store so many blocks in a tier. Raises ``StoreFault`` if it does not take them all."""
    facade = runtime_of([tier], block_bytes)
    try:
        stored = 0
        for first in range(0, blocks, SLOTS // 2):
            keys = [_key(each) for each in range(first, min(first + SLOTS // 2, blocks))]
            _store(facade, f"r{first}", keys)
            stored += told_of_tiers(facade)
            shown.advance(len(keys))
        if stored < blocks:
            raise StoreFault(f"{blocks - stored} of {blocks} blocks were not stored")
    finally:
        facade.close()


def _store(facade: SchedulerFacade, request: str, keys: list[bytes]) -> None:
    facade.on_request_started(request)
    grant = facade.prepare_store(keys, request)
    if grant is None or len(grant.keys) < len(keys):
        raise StoreFault(f"there is no room for {len(keys)} blocks in memory")
    facade.complete_store(grant.keys, request)
    facade.on_request_finished(request)
    facade.step_end()
    while facade.get_finished():
        time.sleep(STEP_S)
        facade.step_end()


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big") * (KEY_BYTES // 8) + bytes(KEY_BYTES % 8)


def _print(runs: list[dict[str, float]], title: str) -> None:
    rows = [
        [name, f"{statistics.median(each[name] for each in runs):.3f}", _range(runs, name)]
        for name in runs[0]
    ]
    table(title, ["", "s", "of runs"], rows)


def _range(runs: list[dict[str, float]], name: str) -> str:
    values = [each[name] for each in runs]
    return f"{min(values):.3f}..{max(values):.3f}"
