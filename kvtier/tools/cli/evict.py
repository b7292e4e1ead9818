"""``kvtier evict``: bounds a folder from outside."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from kvtier.errors import ConfigError
from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.options import Json, StoragePlace

if TYPE_CHECKING:
    from kvtier.plugin_api.offline import Offline

OVER: Final = 1
"""The exit status if the folder still holds more."""


def evict(
    path: StoragePlace,
    /,
    *,
    capacity: Annotated[str, Parameter(metavar="SIZE")],
    every: Annotated[float | None, Parameter(metavar="SECONDS")] = None,
    once: bool = False,
    json: Json = None,
) -> int:
    """Keep the folder of an fs tier within a size: remove the least recently used blocks.

    For a folder without a cleaner, such as the one that vLLM's own fs tier fills: run it from a
    cron job, or beside the engines with --every. Engines that use the folder need no change. For
    engines with capacity_bytes their records of use count, for all others the times of the files.
    The exit status is 0 if the folder holds no more than --capacity afterwards, 1 if
    it does, and 2 if the folder or an option was refused.

    Parameters
    ----------
    capacity
        the most that the folder may hold: 500GB, 2TiB
    every
        clean again and again, until interrupted
    once
        clean once, then end (this is the default)
    """
    from kvtier.plugin_api.sizes import read_bytes  # noqa: PLC0415 - heavy imports stay out of other runs
    from kvtier.tools.cli import storage  # noqa: PLC0415 - as above
    from kvtier.tools.terminal import report  # noqa: PLC0415 - as above

    capacity_bytes = read_bytes(capacity, "--capacity")
    if every is not None and once:
        raise ConfigError("--every excludes --once. Give one of them.")
    if every is not None and not 0 < every < threading.TIMEOUT_MAX:
        raise ConfigError(f"--every {every:g} must be a number of seconds above 0.")
    with storage.opened(path, json) as offline:
        while True:
            figures = _shrink(offline, capacity_bytes)
            report(json, figures, partial(_show, figures), in_one_line=every is not None)
            if not figures["complete"]:
                return INTERRUPTED
            if every is None:
                return OVER if figures["bytes_left"] > capacity_bytes else 0
            if _was_interrupted(every):
                return INTERRUPTED


def _was_interrupted(seconds: float) -> bool:
    """Wait for the next time. Ctrl-C ends the wait, and the command."""
    try:
        threading.Event().wait(seconds)
    except KeyboardInterrupt:
        return True
    return False


def _shrink(offline: Offline, capacity: int) -> dict[str, Any]:
    from kvtier.tools.terminal import progress  # noqa: PLC0415 - as in evict

    done = offline.shrink(capacity, progress)
    return {
        "path": offline.place,
        "complete": done.is_complete,
        "capacity_bytes": capacity,
        "blocks": done.blocks,
        "bytes": done.bytes,
        "other_bytes": done.other_bytes,
        "blocks_removed": done.blocks_removed,
        "bytes_removed": done.bytes_removed,
        "bytes_left": done.bytes_left,
        "blocks_failed": done.blocks_failed,
        "reason": done.reason,
    }


def _show(figures: dict[str, Any]) -> None:
    from kvtier.plugin_api.sizes import shown_bytes  # noqa: PLC0415 - as in evict

    print(
        f"{figures['path']}: removed {figures['blocks_removed']:,} of {figures['blocks']:,} "
        f"blocks, {shown_bytes(figures['bytes_removed'])}. Left: "
        f"{shown_bytes(figures['bytes_left'])} of {shown_bytes(figures['capacity_bytes'])}."
    )
    if figures["blocks_failed"]:
        print(f"{figures['blocks_failed']:,} blocks could not be removed: {figures['reason']}.")
    if figures["other_bytes"] > figures["capacity_bytes"]:
        print(f"Files that are no blocks take {shown_bytes(figures['other_bytes'])} of it.")
    if not figures["complete"]:
        print("Interrupted: the rest is as it was.")
