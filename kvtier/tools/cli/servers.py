"""What ``ls`` and ``purge`` do to the servers of a tier, which engines may be using meanwhile.

The path is an address, or the tier's entry of ``secondary_tiers`` as JSON where it needs more.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError, StoreFault
from kvtier.plugin_api.options import shown
from kvtier.tools.cli.folders import gib, report
from kvtier.tools.cli.namespaces import (
    show_differences,
    show_namespaces,
    show_removed,
    the_one_meant,
)
from kvtier.tools.cli.server_kinds import KINDS, Servers, kind_of_address
from kvtier.tools.cli.terminal import check_can_write, progress, says_yes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

    from kvtier_backends.shared.holdings import Holding, Wanted

PROBLEMS: Final = 1
ENTRY: Final = "{"


def ls(arguments: argparse.Namespace) -> int:
    """Show what the servers hold. Returns the exit status."""
    servers = _servers(arguments)
    figures = _figures(_list(servers).values())
    report(arguments, {"path": servers.place, "complete": True, **figures}, _listed)
    return 0


def purge(arguments: argparse.Namespace, wanted: Wanted) -> int:
    """Remove what was selected. Returns the exit status."""
    servers = _servers(arguments)
    if wanted.before_s is not None and not servers.tell_age:
        raise ConfigError(
            f"--older-than {arguments.older_than!r}: these servers do not say how old a block is. "
            "Give the tier ttl_s, or remove a whole namespace."
        )
    is_asked = arguments.all and not (arguments.yes or arguments.dry_run) and sys.stdin.isatty()
    found: dict[str, Holding] = {}
    if is_asked or wanted.namespace is not None:
        found = _list(servers)
    wanted = wanted._replace(namespace=the_one_meant(wanted.namespace, sorted(found)))
    if is_asked and not says_yes(_question(servers, found)):
        print(f"{servers.place}: nothing was removed.")
        return PROBLEMS
    dry = bool(arguments.dry_run)
    gone, failed = _run(
        servers,
        "looking at names" if dry else "removing",
        lambda advance: servers.purge(wanted, advance, dry=dry),
    )
    figures = {
        "path": servers.place,
        "dry_run": dry,
        "complete": True,
        **_figures(gone.values()),
        "blocks_failed": failed,
    }
    report(arguments, figures, _purged)
    return PROBLEMS if failed else 0


def _list(servers: Servers) -> dict[str, Holding]:
    found: dict[str, Holding] = _run(servers, "looking at names", servers.list)
    return found


def _servers(arguments: argparse.Namespace) -> Servers:
    """Read what was given. Raises ``ConfigError``, and ``Misuse`` for a file that can't be."""
    if arguments.json and arguments.json != "-":
        check_can_write(arguments.json)
    path = arguments.path
    if path.lstrip().startswith(ENTRY):
        try:
            entry = json.loads(path)
        except (ValueError, RecursionError) as problem:
            raise ConfigError(
                f"{path} is no JSON ({problem}). Give one entry of secondary_tiers."
            ) from None
        kind = entry.pop("type", None)
    else:
        kind, entry = kind_of_address(path), {"url": path}
    if kind not in KINDS:
        raise ConfigError(
            f"{shown(path)} is no tier whose blocks can be listed. Name the folder of a disk or an "
            "fs tier, an address that begins with redis:// or s3://, or an entry of such a tier."
        )
    return KINDS[kind](entry)


def _run(servers: Servers, doing: str, call: Callable[[Callable[[int], None]], Any]) -> Any:  # noqa: ANN401 - what it returns
    with progress(doing, None) as bar:
        try:
            return asyncio.run(call(bar.advance))
        except StoreFault as problem:
            raise ConfigError(
                f"{servers.place} can't be looked at: {problem}. See to the server, or give an "
                "entry of secondary_tiers with what it asks for."
            ) from problem


def _question(servers: Servers, found: dict[str, Holding]) -> str:
    figures = _figures(found.values())
    return (
        f"Remove all blocks from {servers.place}, which engines may be using: "
        f"{figures['blocks']:,} blocks, {gib(figures['bytes'])} GiB, {len(found)} "
        "namespaces? [y/N] "
    )


def _figures(holdings: Iterable[Holding]) -> dict[str, Any]:
    rows = sorted(map(asdict, holdings), key=lambda row: row["bytes"], reverse=True)
    return {
        "blocks": sum(row["blocks"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "namespaces": rows,
    }


def _listed(figures: dict[str, Any]) -> None:
    print(figures["path"])
    rows = figures["namespaces"]
    show_namespaces("Blocks by namespace", rows)
    digests = [row["namespace"].rpartition("_")[2] for row in rows]
    show_differences(digests, [row["facts"] for row in rows])


def _purged(figures: dict[str, Any]) -> None:
    show_removed(figures, show_namespaces)
