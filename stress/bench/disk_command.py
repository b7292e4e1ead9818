"""``stress.bench disk``: runs the measurements, and prints and writes what they found."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import Misuse
from kvtier.plugin_api.sizes import read_bytes
from kvtier.tools.bench.tier_command import block_sizes
from kvtier.tools.cli.terminal import progress, table, write_json
from stress.bench.about import about
from stress.bench.asked import add_path, asked_folder
from stress.bench.disk import KINDS, DiskBenchOptions, DiskMeasured, blocks_of_a_job, measure
from stress.bench.disk_figures import cpu_s_per_gb, gb_per_s, job_ms, pauses_ms, ratios
from stress.bench.disk_lmcache import LMCACHE, lmcache_version
from stress.bench.disk_sides import CAPACITY_LEGS
from stress.bench.sides import KVTIER, VLLM

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

THREADS_MIN: Final = 2  #: vLLM's tier wants one at least that reads, and one that writes
SHOWN_AS: Final = {VLLM: "vLLM fs", KVTIER: "kvtier disk", LMCACHE: "LMCache raw_block"}
NOTHING: Final = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_path(parser)
    parser.add_argument(
        "--block-bytes",
        metavar="SIZES",
        default="64KiB,256KiB,1MiB,2MiB,4MiB,8MiB",
        help="block sizes, measured one after the other (default: %(default)s)",
    )
    parser.add_argument(
        "--bytes",
        metavar="SIZE",
        default="512MiB",
        help="bytes that each side moves in one leg (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of runs; figures are their medians (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=16,
        help="threads of each side, and the queue depth of fio (default: %(default)s)",
    )
    parser.add_argument(
        "--encryption", action="store_true", help="measure the encrypted disk tier as well"
    )
    parser.add_argument(
        "--beside",
        choices=("lmcache",),
        help="measure LMCache's raw_block adapter as well, if LMCache is installed",
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="keep the page cache: by default it is dropped before each load",
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure, print the tables, write the file."""
    block_sizes, leg_bytes = _sizes(arguments)
    place = asked_folder(arguments.path)
    if arguments.threads < THREADS_MIN:
        raise Misuse(f"--threads {arguments.threads} must be at least {THREADS_MIN}.")
    report: dict[str, Any] = {**about(), "sizes": []}
    if arguments.beside == LMCACHE:
        report["beside"] = lmcache_version()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=place) as folder:
        options = DiskBenchOptions(
            folder=Path(folder),
            leg_bytes=leg_bytes,
            rounds=arguments.rounds,
            threads=arguments.threads,
            encrypted=arguments.encryption,
            beside_lmcache=arguments.beside == LMCACHE,
            warm=arguments.warm,
        )
        _check_room(options)
        report["options"] = {**asdict(options), "folder": str(place)}
        for block_bytes in block_sizes:
            with progress(f"blocks of {_size(block_bytes)}", options.legs) as shown:
                measured = measure(options, block_bytes, shown.advance)
            report["sizes"].append(_to_json(measured))
            _print_figures(report["sizes"][-1], options)
    _print_ratios(report["sizes"])
    if arguments.json:
        write_json(arguments.json, report)


def _sizes(arguments: argparse.Namespace) -> tuple[list[int], int]:
    """Read the sizes of blocks, and of a leg."""
    sizes = block_sizes(arguments.block_bytes)
    leg_bytes = read_bytes(arguments.bytes, "--bytes")
    for size in sizes:
        if leg_bytes < blocks_of_a_job(size) * size:
            raise Misuse(
                f"--bytes {leg_bytes} is less than one job of {blocks_of_a_job(size)} blocks of "
                f"{_size(size)}. Give {_size(blocks_of_a_job(size) * size)} or more."
            )
    return sizes, leg_bytes


def _check_room(options: DiskBenchOptions) -> None:
    tiers = 1 + options.encrypted
    others = 4 + options.beside_lmcache  # both fs tiers, raw and fio
    needed = int((tiers * CAPACITY_LEGS + others) * options.leg_bytes)
    free = shutil.disk_usage(options.folder).free
    if free < needed:
        raise Misuse(
            f"{options.folder.parent} has {free >> 20} MiB free, and needs {needed >> 20} MiB. "
            "Name another folder with --path, or give fewer --bytes."
        )


def _to_json(measured: DiskMeasured) -> dict[str, Any]:
    """Return all figures of one block size, round by round where there are rounds."""

    def each(figure: Callable[[str, str], Any], sides: list[str]) -> dict[str, dict[str, Any]]:
        return {kind: {side: figure(kind, side) for side in sides} for kind in KINDS}

    busy_sides = list(measured.rounds[0].busy[KINDS[0]])
    return {
        "block_bytes": measured.block_bytes,
        "leg_bytes": measured.leg_bytes,
        "job_blocks": measured.job_blocks,
        "jobs_in_flight": measured.jobs_in_flight,
        "gb_per_s": each(lambda k, s: gb_per_s(measured, k, s, busy=False), measured.sides),
        "gb_per_s_busy": each(lambda k, s: gb_per_s(measured, k, s, busy=True), busy_sides),
        "job_p50_ms": each(lambda k, s: job_ms(measured, k, s, 50), measured.sides),
        "job_p99_ms": each(lambda k, s: job_ms(measured, k, s, 99), measured.sides),
        "cpu_s_per_gb": each(lambda k, s: cpu_s_per_gb(measured, k, s), measured.sides),
        "longest_pause_ms": each(lambda k, s: pauses_ms(measured, k, s), busy_sides),
        "longest_pause_without_io_ms": [r.pause_without_io_s * 1e3 for r in measured.rounds],
        "direct": measured.direct,
        "page_cache_bytes": measured.page_cache_bytes,
        "counters": measured.counters,
        "fio": measured.fio,
        "ratios": [ratio.to_json() for ratio in ratios(measured)],
    }


def _print_figures(figures: dict[str, Any], options: DiskBenchOptions) -> None:
    sides = list(figures["gb_per_s"][KINDS[0]])
    rows = []
    for kind in KINDS:
        for name, key, digits in (
            ("GB/s", "gb_per_s", 2),
            ("job p50, ms", "job_p50_ms", 1),
            ("job p99, ms", "job_p99_ms", 1),
            ("CPU s a GB", "cpu_s_per_gb", 2),
            ("GB/s, thread busy", "gb_per_s_busy", 2),
            ("longest pause, ms", "longest_pause_ms", 1),
        ):
            cells = (_cell(figures[key][kind].get(side), digits) for side in sides)
            rows.append([f"{kind}, {name}", *cells])
    size = _size(figures["block_bytes"])
    table(f"{size} blocks", ["", *(SHOWN_AS.get(side, side) for side in sides)], rows)
    jobs = f"{figures['job_blocks']} blocks each, {figures['jobs_in_flight']} at once"
    moved = f"{_size(figures['leg_bytes'])}, medians of {options.rounds} rounds"
    notes = [
        ["jobs", jobs],
        ["threads of each side", f"{options.threads}"],
        ["bytes of a leg", moved],
        [
            "longest pause of the same busy thread without I/O, ms",
            _cell(figures["longest_pause_without_io_ms"], 1),
        ],
        ["opened with O_DIRECT", _direct(figures["direct"])],
        ["in the page cache as loads began, of a leg", _cached(figures, options)],
        ["fio", figures["fio"]],
    ]
    table("", ["", ""], notes)


def _print_ratios(sizes: list[dict[str, Any]]) -> None:
    rows = []
    for figures in sizes:
        for ratio in figures["ratios"]:
            of_rounds = ratio["of_rounds"]
            rows.append(
                [
                    f"{_size(figures['block_bytes'])}: {ratio['name']}",
                    f"{ratio['median']:.2f}",
                    f"{min(of_rounds):.2f}..{max(of_rounds):.2f}",
                    _bar(ratio),
                    "" if ratio["holds"] is None else "yes" if ratio["holds"] else "NO",
                ]
            )
    table("kvtier disk", ["", "ratio", "of rounds", "bar", "holds"], rows)


def _cell(values: list[float] | float | None, digits: int) -> str:
    """Show a figure, or the median of one a round."""
    if values is None:
        return NOTHING
    value = statistics.median(values) if isinstance(values, list) else values
    return f"{value:,.{digits}f}"


def _direct(direct: dict[str, bool]) -> str:
    buffered = [side for side, is_direct in direct.items() if not is_direct]
    return "all" if not buffered else f"all but {', '.join(buffered)}"


def _cached(figures: dict[str, Any], options: DiskBenchOptions) -> str:
    """Say how much of a leg's bytes each side could have had without the disk."""
    shares = {
        side: min(1.0, count / figures["leg_bytes"])  # a folder may have more than a leg's
        for side, count in figures["page_cache_bytes"].items()
    }
    shown = ", ".join(f"{side} {share:.1%}" for side, share in shares.items())
    return f"{shown} ({'left as it was' if options.warm else 'dropped before'})"


def _bar(ratio: dict[str, Any]) -> str:
    if ratio["at_least"] is not None:
        return f">= {ratio['at_least']:.2f}"
    return "" if ratio["at_most"] is None else f"<= {ratio['at_most']:.2f}"


def _size(count: int) -> str:
    """Write a size as people do, without rounding it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} bytes"
