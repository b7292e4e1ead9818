"""Remove blocks of a disk, an fs, a redis or an s3 tier: by age, by namespace, dead ones, or all.

They are not found again, and their bytes are taken off the disk. If an engine is
using a disk tier's folder, it is asked to do it. Redis and Valkey do not say how old a block is. On
a terminal, --all asks first. The exit status is 0 if all that was selected is gone, 1 if
not, and 2 if what was named, or an option, was refused.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.sizes import parse_duration
from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.options import add_folder_options, is_server

if TYPE_CHECKING:
    import argparse

    from kvtier_backends.disk.offline.inspection import Folder
    from kvtier_backends.disk.offline.listing import Kind
    from kvtier_backends.disk.offline.purging import Selection
    from kvtier_backends.shared.holdings import Wanted

LEFT: Final = 1
"""The exit status if something that was selected may still be there."""

_OF_ANY_AGE_S: Final = 1 << 32
"""After any time that a table can name: a clock that ran ahead must not keep blocks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_folder_options(parser, or_servers=True)
    what = parser.add_argument_group("what to remove; at least one of them")
    what.add_argument("--older-than", metavar="AGE", help="blocks stored longer ago: 30m, 12h, 7d")
    what.add_argument(
        "--namespace",
        metavar="DIGEST",
        help="blocks of this namespace; as many digits as tell it from the others",
    )
    what.add_argument(
        "--dead",
        action="store_true",
        help="blocks of weights without a name, which no engine finds but the one that stored "
        "them, until it ends; a disk tier evicts these first by itself",
    )
    what.add_argument(
        "--all", action="store_true", help="all blocks, and regions that cannot be read"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask for confirmation of --all")
    parser.add_argument(
        "--dry-run", action="store_true", help="remove nothing, and show what would be removed"
    )


def run(arguments: argparse.Namespace) -> int:
    """Remove the blocks and report. Returns the exit status."""
    from kvtier.tools.cli import folders  # noqa: PLC0415 - heavy imports stay out of other runs
    from kvtier_backends.disk.offline.inspection import Folder  # noqa: PLC0415 - as above

    before_s = _before_s(arguments)
    if is_server(arguments.path):
        from kvtier.tools.cli import servers  # noqa: PLC0415 - as above

        return servers.purge(arguments, _wanted(arguments, before_s))
    folders.check(arguments)
    if folders.is_fs_folder(arguments.path):
        return _purge_fs(arguments, before_s)
    if arguments.dead:
        raise ConfigError(
            f"--dead: {arguments.path} is the folder of a disk tier, which evicts such blocks "
            "first. Name an fs, a redis or an s3 tier."
        )
    with folders.refusing(arguments.path), Folder(arguments.path) as folder:
        selection = _selection(folder, arguments, before_s)
        if arguments.dry_run:
            figures = _do_here(folder, selection, dry=True)
        elif not _is_sure(folder, selection, arguments):
            print(f"{folder.path}: nothing was removed.")
            return LEFT
        else:
            asked = _ask(folder.path, selection)
            figures = asked if asked is not None else _do(folder.path, selection)
    figures = {"path": folder.path, "dry_run": bool(arguments.dry_run), **figures}
    folders.report(arguments, figures, _show)
    if not figures["complete"]:
        return INTERRUPTED
    return LEFT if figures["regions_failed"] or figures["error"] else 0


def _purge_fs(arguments: argparse.Namespace, before_s: int) -> int:
    from kvtier.tools.cli import fs_folders  # noqa: PLC0415 - as in run
    from kvtier.tools.cli.terminal import says_yes  # noqa: PLC0415 - as in run

    is_asked = arguments.all and not (arguments.yes or arguments.dry_run) and sys.stdin.isatty()
    if is_asked and not says_yes(fs_folders.question(arguments)):
        print(f"{arguments.path}: nothing was removed.")
        return LEFT
    return fs_folders.purge(arguments, _wanted(arguments, before_s))


def _wanted(arguments: argparse.Namespace, before_s: int) -> Wanted:
    from kvtier_backends.shared.holdings import Wanted  # noqa: PLC0415 - as in run

    before = None if arguments.older_than is None else before_s
    return Wanted(arguments.namespace, before, bool(arguments.dead))


def _is_sure(folder: Folder, selection: Selection, arguments: argparse.Namespace) -> bool:
    """Ask before everything goes, if there is somebody to ask."""
    from kvtier.tools.cli.folders import gib  # noqa: PLC0415 - as in run
    from kvtier.tools.cli.terminal import says_yes  # noqa: PLC0415 - as in run
    from kvtier_backends.disk.offline.inspection import user_of  # noqa: PLC0415 - as in run

    if not arguments.all or arguments.yes or not sys.stdin.isatty():
        return True
    there = _do_here(folder, selection, dry=True)
    user = user_of(folder.path)
    used = f", which {user} is using" if user is not None else ""
    question = (
        f"Remove everything from {folder.path}{used}: {there['blocks']:,} blocks, "
        f"{gib(there['bytes'])} GiB, {len(there['namespaces'])} namespaces? [y/N] "
    )
    return says_yes(question)


def _before_s(arguments: argparse.Namespace) -> int:
    """Return the time before which blocks are to go. Raises ``ConfigError``."""
    given = (arguments.older_than is not None, arguments.namespace is not None, arguments.dead)
    if arguments.all and any(given):
        raise ConfigError("--all excludes --older-than, --namespace and --dead. Give it alone.")
    if not (arguments.all or any(given)):
        raise ConfigError("nothing is selected. Give --older-than, --namespace, --dead or --all.")
    if arguments.namespace == "":
        raise ConfigError("--namespace '' is no digest. Give its first digits, or leave it out.")
    if arguments.older_than is None:
        return _OF_ANY_AGE_S
    age_s = parse_duration(arguments.older_than)
    if age_s is None:
        raise ConfigError(
            f"--older-than {arguments.older_than!r} is no age. Write one such as 30m, 12h or 7d."
        )
    return max(0, int(time.time() - age_s))


def _selection(folder: Folder, arguments: argparse.Namespace, before_s: int) -> Selection:
    """Return what to remove. Raises ``ConfigError`` if the namespace is not one of the folder's."""
    from kvtier.tools.cli.terminal import progress  # noqa: PLC0415 - as in run
    from kvtier_backends.disk.offline.listing import list_folder  # noqa: PLC0415 - as in run
    from kvtier_backends.disk.offline.purging import Selection  # noqa: PLC0415 - as in run

    if arguments.namespace is None:
        return Selection(before_s, all_of_it=bool(arguments.all))
    numbers = folder.files.numbers()
    with progress("looking for the namespace", len(numbers)) as bar:
        listing = list_folder(folder, numbers, bar.advance)
    if not listing.is_complete:
        raise KeyboardInterrupt
    known = sorted({kind.namespace for kind in listing.holdings})
    meant = [digest for digest in known if digest.hex().startswith(arguments.namespace.lower())]
    if len(meant) != 1:
        what = "fits several namespaces" if meant else "is no namespace of this folder"
        there = ", ".join(digest.hex() for digest in known) or "none"
        raise ConfigError(f"--namespace {arguments.namespace!r} {what}. There are: {there}.")
    return Selection(before_s, meant[0])


def _ask(path: str, selection: Selection) -> dict[str, Any] | None:
    """Have the engine do it, if there is one."""
    from kvtier.tools.cli.terminal import progress  # noqa: PLC0415 - as in run
    from kvtier_backends.disk.offline.inspection import user_of  # noqa: PLC0415 - as in run
    from kvtier_backends.disk.offline.listing import Kind  # noqa: PLC0415 - as in run
    from kvtier_backends.disk.offline.purge_requests import (  # noqa: PLC0415 - as in run
        NotAnswered,
        ask_engine,
    )

    user = user_of(path)
    if user is None:
        return None
    try:
        with progress(f"asking {user}", None) as bar:
            answer = ask_engine(path, selection, lambda: bar.advance(1))
    except NotAnswered as error:
        return _figures({}, str(user), 0, error=str(error))
    if answer is None:
        return None
    rows, regions_failed = answer
    return _figures({Kind(*row[:3]): row[3] for row in rows}, str(user), regions_failed)


def _do(path: str, selection: Selection) -> dict[str, Any]:
    """Remove from a folder that nobody uses."""
    from kvtier.tools.cli.folders import claimed  # noqa: PLC0415 - as in run
    from kvtier_backends.disk.offline.inspection import Folder  # noqa: PLC0415 - as in run

    with claimed(path, "purge"), Folder(path, writable=True) as folder:
        return _do_here(folder, selection, dry=False)


def _do_here(folder: Folder, selection: Selection, *, dry: bool) -> dict[str, Any]:
    from kvtier.tools.cli.terminal import progress  # noqa: PLC0415 - as in run
    from kvtier_backends.disk.offline.purging import purge_folder  # noqa: PLC0415 - as in run

    numbers = folder.files.numbers()
    with progress("looking at regions" if dry else "removing", len(numbers)) as bar:
        purged = purge_folder(folder, numbers, selection, bar.advance, dry=dry)
    removed = {kind: keys.count() for kind, keys in purged.kinds.items()}
    return _figures(removed, None, purged.regions_failed, complete=purged.is_complete)


def _figures(
    removed: dict[Kind, int],
    engine: str | None,
    regions_failed: int,
    *,
    complete: bool = True,
    error: str = "",
) -> dict[str, Any]:
    from kvtier.tools.cli.folders import kind_figures  # noqa: PLC0415 - as in run

    rows = [kind_figures(kind, blocks) for kind, blocks in sorted(removed.items())]
    return {
        "removed_by": engine,
        "blocks": sum(row["blocks"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "namespaces": rows,
        "regions_failed": regions_failed,
        "complete": complete,
        "error": error,
    }


def _show(figures: dict[str, Any]) -> None:
    from kvtier.tools.cli.folders import KIND_COLUMNS, gib, kind_row  # noqa: PLC0415 - as in run
    from kvtier.tools.cli.terminal import table  # noqa: PLC0415 - as in run

    verb = "Would be removed" if figures["dry_run"] else "Removed"
    if figures["error"]:
        print(f"Nothing is known to be removed: {figures['error']}")
        return
    by = f" by {figures['removed_by']}" if figures["removed_by"] else ""
    if figures["namespaces"]:
        table(f"{verb}{by}", KIND_COLUMNS, [kind_row(row) for row in figures["namespaces"]])
    size = f"{figures['blocks']:,} blocks, {gib(figures['bytes'])} GiB"
    print(f"{figures['path']}: {verb.lower()}{by}: {size}.")
    if figures["regions_failed"]:
        print(f"{figures['regions_failed']:,} regions could not be read or changed.")
    if not figures["complete"]:
        print("Interrupted: the rest is as it was.")
