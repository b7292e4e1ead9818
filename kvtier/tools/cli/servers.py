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
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.plugin_api.options import shown
from kvtier.tools.cli.folders import gib, report
from kvtier.tools.cli.namespaces import show_differences, show_removed, the_one_meant
from kvtier.tools.cli.terminal import check_can_write, progress, says_yes, table
from kvtier_backends.redis.addresses import SCHEMES
from kvtier_backends.redis.client import Client
from kvtier_backends.redis.offline import Holding, list_servers, purge_servers
from kvtier_backends.redis.redis_options import RedisOptions, read_options

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

PROBLEMS: Final = 1
ENTRY: Final = "{"
ADDRESS: Final = "://"


def ls(arguments: argparse.Namespace) -> int:
    """Show what the servers hold. Returns the exit status."""
    client, given = _servers(arguments)
    figures = _figures(_list(client, given).values())
    report(arguments, {"path": given.place, "complete": True, **figures}, _listed)
    return 0


def purge(arguments: argparse.Namespace) -> int:
    """Remove what was selected. Returns the exit status."""
    if arguments.older_than is not None:
        raise ConfigError(
            f"--older-than {arguments.older_than!r}: servers do not say how old a block is. Give "
            "the tier ttl_s, or remove a whole namespace."
        )
    client, given = _servers(arguments)
    is_asked = arguments.all and not (arguments.yes or arguments.dry_run) and sys.stdin.isatty()
    found: dict[str, Holding] = {}
    if is_asked or arguments.dry_run or arguments.namespace is not None:
        found = _list(client, given)
    namespace = the_one_meant(arguments.namespace, sorted(found))
    if is_asked and not says_yes(_question(given, found)):
        print(f"{given.place}: nothing was removed.")
        return PROBLEMS
    if arguments.dry_run:
        gone, failed = {n: h for n, h in found.items() if namespace in (None, n)}, 0
    else:
        gone, failed = _run(
            given, "removing", lambda advance: purge_servers(client, given, namespace, advance)
        )
    figures = {
        "path": given.place,
        "dry_run": bool(arguments.dry_run),
        "complete": True,
        **_figures(gone.values()),
        "blocks_failed": failed,
    }
    report(arguments, figures, _purged)
    return PROBLEMS if failed else 0


def _list(client: Client, given: RedisOptions) -> dict[str, Holding]:
    found: dict[str, Holding] = _run(
        given, "looking at names", lambda advance: list_servers(client, given, advance)
    )
    return found


def _servers(arguments: argparse.Namespace) -> tuple[Client, RedisOptions]:
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
    else:
        entry = {"type": "redis", "url": path}
    kind = entry.pop("type", None)
    scheme = str(entry.get("url", "")).partition(ADDRESS)[0]
    if kind != "redis" or scheme not in SCHEMES:
        raise ConfigError(
            f"{shown(path)} is no tier whose blocks can be listed. Name the folder of a disk or an "
            f"fs tier, an address that begins with {SCHEMES[0]}://, or an entry of a redis tier."
        )
    reader, given = read_options(entry, BackendContext(1, Namespace({}), "redis"))
    return Client(given, reader), given


def _run(given: RedisOptions, doing: str, call: Callable[[Callable[[int], None]], Any]) -> Any:  # noqa: ANN401 - what it returns
    with progress(doing, None) as bar:
        try:
            return asyncio.run(call(bar.advance))
        except StoreFault as problem:
            raise ConfigError(
                f"{given.place} can't be looked at: {problem}. See to the server, or give an entry "
                "of secondary_tiers with what it asks for."
            ) from problem


def _question(given: RedisOptions, found: dict[str, Holding]) -> str:
    figures = _figures(found.values())
    return (
        f"Remove all blocks from {given.place}, which engines may be using: "
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


def _show(title: str, rows: list[dict[str, Any]]) -> None:
    cells = [(row["namespace"], f"{row['blocks']:,}", gib(row["bytes"])) for row in rows]
    table(title, ("namespace", "blocks", "GiB"), cells)


def _listed(figures: dict[str, Any]) -> None:
    print(figures["path"])
    rows = figures["namespaces"]
    _show("Blocks by namespace", rows)
    digests = [row["namespace"].rpartition("_")[2] for row in rows]
    show_differences(digests, [row["facts"] for row in rows])


def _purged(figures: dict[str, Any]) -> None:
    show_removed(figures, _show)
