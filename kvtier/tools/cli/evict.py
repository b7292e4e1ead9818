"""Keep the folder of an fs tier within a size: remove what was used least recently.

For a folder that nobody cleans, such as the one that vLLM's own fs tier fills: run it from a cron
job, or beside the engines with --every. Engines that use the folder need not know of it. Which
blocks engines with capacity_bytes have used is known; of all others the times of the files count.
The exit status is 0 if the folder holds no more than --capacity afterwards, 1 if it does, and 2 if
the folder or an option was refused.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.options import add_fs_folder_options

if TYPE_CHECKING:
    import argparse

OVER: Final = 1
"""The exit status if the folder still holds more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_fs_folder_options(parser)
    parser.add_argument(
        "--capacity", metavar="SIZE", required=True, help="what the folder may hold: 500GB, 2TiB"
    )
    how_often = parser.add_mutually_exclusive_group()
    how_often.add_argument(
        "--once", action="store_true", help="clean once, then end (this is the default)"
    )
    how_often.add_argument(
        "--every", metavar="SECONDS", type=float, help="clean again and again, until interrupted"
    )


def run(arguments: argparse.Namespace) -> int:
    """Clean the folder and report. Returns the exit status."""
    from kvtier.plugin_api.sizes import read_bytes  # noqa: PLC0415 - heavy imports stay out of other runs
    from kvtier.tools.cli import folders  # noqa: PLC0415 - as above

    capacity = read_bytes(arguments.capacity, "--capacity")
    if arguments.every is not None and not 0 < arguments.every < threading.TIMEOUT_MAX:
        raise ConfigError(f"--every {arguments.every:g} must be a number of seconds above 0.")
    folders.check(arguments)
    while True:
        figures = _clean(arguments.path, capacity)
        if arguments.every is None:
            folders.report(arguments, figures, _show)
            break
        if arguments.json == "-":
            print(json.dumps(figures, allow_nan=False), flush=True)
        else:
            folders.report(arguments, figures, _show)
        if not figures["complete"] or _was_interrupted(arguments.every):
            return INTERRUPTED
    if not figures["complete"]:
        return INTERRUPTED
    return OVER if figures["bytes_left"] > capacity else 0


def _was_interrupted(seconds: float) -> bool:
    """Wait for the next time. Ctrl-C ends the wait, and the command."""
    try:
        threading.Event().wait(seconds)
    except KeyboardInterrupt:
        return True
    return False


def _clean(path: str, capacity: int) -> dict[str, Any]:
    from kvtier.tools.cli.folders import refusing  # noqa: PLC0415 - as in run
    from kvtier_backends.fs.offline.evicting import evict_to  # noqa: PLC0415 - as in run
    from kvtier_backends.fs.offline.inspection import FsFolder  # noqa: PLC0415 - as in run

    with refusing(path), FsFolder(path) as folder:
        done = evict_to(folder, capacity, lambda _count: None)
        return {
            "path": folder.path,
            "complete": done.is_complete,
            "capacity_bytes": capacity,
            "blocks": done.blocks,
            "bytes": done.bytes,
            "other_bytes": done.others,
            "blocks_removed": done.removed_blocks,
            "bytes_removed": done.removed_bytes,
            "bytes_left": done.left,
            "blocks_failed": done.failed,
            "reason": done.reason,
        }


def _show(figures: dict[str, Any]) -> None:
    from kvtier.tools.cli.folders import gib  # noqa: PLC0415 - as in run

    print(
        f"{figures['path']}: removed {figures['blocks_removed']:,} of {figures['blocks']:,} "
        f"blocks, {gib(figures['bytes_removed'])} GiB. Left: {gib(figures['bytes_left'])} of "
        f"{gib(figures['capacity_bytes'])} GiB."
    )
    if figures["blocks_failed"]:
        print(f"{figures['blocks_failed']:,} blocks could not be removed: {figures['reason']}.")
    if figures["other_bytes"] > figures["capacity_bytes"]:
        print(f"Files that are no blocks take {gib(figures['other_bytes'])} GiB of it.")
    if not figures["complete"]:
        print("Interrupted: the rest is as it was.")
