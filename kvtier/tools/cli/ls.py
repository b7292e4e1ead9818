"""Show what a disk, an fs, a redis or an s3 tier holds: namespaces, blocks, bytes and ages.

Nothing is changed, and engines may be using it. What counts is what
an engine would find at its start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.options import add_folder_options, is_server

if TYPE_CHECKING:
    import argparse

    from kvtier_backends.disk.offline.inspection import Folder
    from kvtier_backends.disk.offline.listing import Listing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_folder_options(parser, or_servers=True)


def run(arguments: argparse.Namespace) -> int:
    """Show the folder. Returns the exit status."""
    if is_server(arguments.path):
        from kvtier.tools.cli import servers  # noqa: PLC0415 - heavy imports stay out of other runs

        return servers.ls(arguments)
    from kvtier.tools.cli import folders  # noqa: PLC0415 - as above
    from kvtier.tools.cli.terminal import progress  # noqa: PLC0415 - as above
    from kvtier_backends.disk.offline.inspection import Folder  # noqa: PLC0415 - as above
    from kvtier_backends.disk.offline.listing import list_folder  # noqa: PLC0415 - as above

    folders.check(arguments)
    if folders.is_fs_folder(arguments.path):
        from kvtier.tools.cli import fs_folders  # noqa: PLC0415 - as above

        return fs_folders.ls(arguments)
    with folders.refusing(arguments.path), Folder(arguments.path) as folder:
        numbers = folder.files.numbers()
        with progress("looking at regions", len(numbers)) as bar:
            listing = list_folder(folder, numbers, bar.advance)
        figures = _figures(folder, listing)
    folders.report(arguments, figures, _show)
    return 0 if listing.is_complete else INTERRUPTED


def _figures(folder: Folder, listing: Listing) -> dict[str, Any]:
    from kvtier.tools.cli.folders import kind_figures  # noqa: PLC0415 - as in run

    rows = [
        {
            **kind_figures(holding.kind, holding.keys.count()),
            "slots": holding.slots,
            "regions": holding.regions,
            "oldest_s": holding.oldest_s,
            "newest_s": holding.newest_s,
            "facts": holding.facts,
        }
        for holding in listing.holdings.values()
    ]
    rows.sort(key=lambda row: row["bytes"], reverse=True)
    return {
        "path": folder.path,
        "complete": listing.is_complete,
        "in_use": listing.user is not None,
        "engine_pid": None if listing.user is None else listing.user.pid,
        "in_use_by": None if listing.user is None else str(listing.user),
        "made_s": folder.superblock.created_s,
        "region_bytes": folder.superblock.region_bytes,
        "regions": dict(sorted(listing.regions.items())),
        "bytes_on_disk": listing.bytes_on_disk,
        "blocks": sum(row["blocks"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "namespaces": rows,
    }


def _show(figures: dict[str, Any]) -> None:
    from kvtier.tools.cli.folders import KIND_COLUMNS, age, gib, kind_row, short  # noqa: PLC0415 - as in run
    from kvtier.tools.cli.namespaces import show_differences  # noqa: PLC0415 - as in run
    from kvtier.tools.cli.terminal import table  # noqa: PLC0415 - as in run

    user = f"by {figures['in_use_by']}" if figures["in_use"] else "no"
    print(figures["path"])
    table(
        "Folder",
        ("", ""),
        [
            ("in use", user),
            ("made", f"{age(figures['made_s'])} ago"),
            ("GiB on disk", gib(figures["bytes_on_disk"])),
            ("bytes of a region", f"{figures['region_bytes']:,}"),
            *(
                (f"regions: {case.removeprefix('region_').replace('_', ' ')}", f"{count:,}")
                for case, count in figures["regions"].items()
            ),
        ],
    )
    table(
        "Blocks by namespace",
        (*KIND_COLUMNS, "slots", "oldest", "newest"),
        [
            (
                *kind_row(row),
                f"{row['slots']:,}",
                age(row["oldest_s"]),
                age(row["newest_s"]),
            )
            for row in figures["namespaces"]
        ],
    )
    facts = {row["namespace"]: row["facts"] for row in figures["namespaces"]}
    show_differences([short(name) for name in facts], list(facts.values()))
    if not figures["complete"]:
        print("Interrupted: not all regions were looked at.")
