"""Options that several commands have. A light module: each start of ``kvtier`` reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import argparse

CAPACITIES: Final = "1%,2%,5%,10%,20%,50%"


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """Add how to read the trace. The trace itself is for the command to add."""
    group = parser.add_argument_group("reading the trace")
    group.add_argument(
        "--format",
        choices=("auto", "mooncake", "qwen-bailian", "plain"),
        default="auto",
        help="format of the trace (default: recognised by its fields)",
    )
    group.add_argument(
        "--block-tokens",
        type=int,
        metavar="N",
        help="tokens in one block of the trace (default: 512 for mooncake, 16 for the others)",
    )
    group.add_argument(
        "--on-bad-line",
        choices=("stop", "skip"),
        default="stop",
        help="what to do with a line that is no request (default: %(default)s)",
    )
    group.add_argument("--limit", type=int, metavar="N", help="read only the first N requests")


def add_folder_options(parser: argparse.ArgumentParser, *, or_servers: bool = False) -> None:
    """Add which folder of a tier to work on, or which servers, and where to write the figures."""
    about = "the folder: the disk tier's path, or the fs tier's root_dir"
    if or_servers:
        about += "; or redis://host:port, s3://bucket/prefix, or such a tier's entry as JSON"
    _add_folder(parser, about)


def is_server(path: str) -> bool:
    """Tell whether this names a server, and no folder."""
    return path.lstrip().startswith("{") or "://" in path


def add_fs_folder_options(parser: argparse.ArgumentParser) -> None:
    """Add which folder of an fs tier to work on, and where to write what was found."""
    _add_folder(parser, "the folder: the root_dir of an fs tier, kvtier's or vLLM's")


def _add_folder(parser: argparse.ArgumentParser, about: str) -> None:
    parser.add_argument("path", metavar="PATH", help=about)
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write all figures to FILE, as JSON; - writes them to stdout, and no tables",
    )


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add where to write what was found."""
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE, as JSON")
    parser.add_argument("--pictures", metavar="DIR", help="write a plot into the folder DIR")


def add_curve_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that ask for curves. If ``policies`` is given, call ``curves.run_curves``."""
    group = parser.add_argument_group("policies alone, without the runtime")
    group.add_argument(
        "--policies",
        metavar="NAMES",
        help="compare these eviction policies (a,b or all) and MIN, which knows the future",
    )
    group.add_argument(
        "--capacities",
        metavar="SIZES",
        default=CAPACITIES,
        help="capacities to compare: blocks, or shares of the trace's distinct blocks "
        "(default: %(default)s)",
    )
