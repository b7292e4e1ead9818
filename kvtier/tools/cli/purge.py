"""``kvtier purge``: removes blocks from a tier's storage."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from kvtier.errors import ConfigError
from kvtier.plugin_api.sizes import parse_duration
from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.options import Json, StoragePlace

if TYPE_CHECKING:
    from kvtier.plugin_api.offline import Offline, Removed, Selection

LEFT: Final = 1
"""The exit status if a selected block may still exist."""


@Parameter(name="*", group="What to remove; at least one of them")
@dataclass(frozen=True, kw_only=True)
class PurgeOptions:
    """The blocks to remove."""

    older_than: Annotated[str | None, Parameter(metavar="AGE")] = None
    """blocks stored longer ago: 30m, 12h, 7d"""

    namespace: Annotated[str | None, Parameter(metavar="DIGEST")] = None
    """blocks of this namespace; give enough digits to identify it"""

    dead: bool = False
    """blocks of weights without a name, which only the engine that stored them finds, until it
    ends; a disk tier evicts these first by itself"""

    all: bool = False
    """all blocks, and regions that cannot be read"""


def purge(
    path: StoragePlace,
    /,
    *,
    what: PurgeOptions = PurgeOptions(),
    yes: bool = False,
    dry_run: bool = False,
    json: Json = None,
) -> int:
    """Remove blocks of a tier: by age, by namespace, dead ones, or all.

    They are not found again, and their bytes are erased from the disk. If an engine is using a disk
    tier's folder, the command leaves it a request to remove them. Redis and Valkey do not record a
    block's age. On a terminal, --all asks for confirmation. The exit status is 0 if all selected
    blocks are gone, 1 if not, and 2 if the place or an option was refused.

    Parameters
    ----------
    yes
        do not ask for confirmation of --all
    dry_run
        remove nothing, and show the blocks that would be removed
    """
    from kvtier.tools.cli import namespaces, storage  # noqa: PLC0415 - heavy imports stay out of other runs
    from kvtier.tools.terminal import progress, report  # noqa: PLC0415 - as above

    selection = _selection(what)
    with storage.opened(path, json) as offline:
        offline.refuse_selection(selection)
        if selection.namespace is not None:
            known = [each.namespace for each in offline.list(progress).namespaces]
            namespace = namespaces.the_one_meant(selection.namespace, known)
            selection = selection._replace(namespace=namespace)
        if what.all and not (yes or dry_run or _is_sure(offline)):
            print(f"{offline.place}: nothing was removed.")
            return LEFT
        removed = offline.remove(selection, progress, dry=dry_run)
    rows = namespaces.figures_of(removed.namespaces)
    figures = {
        "path": offline.place,
        "dry_run": dry_run,
        "complete": removed.is_complete,
        **namespaces.sums_of(rows),
        "namespaces": rows,
        **removed.figures,
    }
    report(json, figures, lambda: _show(removed, figures))
    if not removed.is_complete:
        return INTERRUPTED
    return LEFT if removed.left else 0


def _show(removed: Removed, figures: dict[str, Any]) -> None:
    from kvtier.tools.cli import namespaces  # noqa: PLC0415 - as in purge

    rows = figures["namespaces"]
    verb = "Would be removed" if figures["dry_run"] else "Removed"
    if removed.by:
        verb += f" by {removed.by}"
    if rows:
        namespaces.show(verb, rows)
    if removed.is_known:
        print(f"{figures['path']}: {verb.lower()}: {namespaces.summed_up(rows)}.")
    if removed.left:
        print(removed.left)
    if not removed.is_complete:
        print("Interrupted: the rest is as it was.")


def _is_sure(offline: Offline) -> bool:
    """Ask for confirmation before removing everything, if there is a terminal."""
    from kvtier.tools.cli import namespaces  # noqa: PLC0415 - as in purge
    from kvtier.tools.terminal import progress, says_yes  # noqa: PLC0415 - as in purge

    if not sys.stdin.isatty():
        return True
    there = namespaces.figures_of(offline.list(progress).namespaces)
    used = f", {offline.users}" if offline.users else ""
    return says_yes(
        f"Remove everything from {offline.place}{used}: {namespaces.summed_up(there)}, "
        f"{len(there)} namespaces? [y/N] "
    )


def _selection(what: PurgeOptions) -> Selection:
    """Return the blocks to remove. Raises ``ConfigError``."""
    from kvtier.plugin_api.offline import Selection  # noqa: PLC0415 - as in purge

    given = (what.older_than is not None, what.namespace is not None, what.dead)
    if what.all and any(given):
        raise ConfigError("--all excludes --older-than, --namespace and --dead. Give it alone.")
    if not (what.all or any(given)):
        raise ConfigError("nothing is selected. Give --older-than, --namespace, --dead or --all.")
    if what.namespace == "":
        raise ConfigError("--namespace '' is no digest. Give its first digits, or leave it out.")
    before_s = None
    if what.older_than is not None:
        age_s = parse_duration(what.older_than)
        if age_s is None:
            raise ConfigError(
                f"--older-than {what.older_than!r} is no age. Write one such as 30m, 12h or 7d."
            )
        before_s = max(0, int(time.time() - age_s))
    return Selection(what.namespace, before_s, bool(what.dead))
