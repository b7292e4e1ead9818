"""Finds suspicious folders of tiers that an engine would accept.

An engine makes a missing folder, and cannot know that a disk should have been mounted above it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.options import Options, shown
from kvtier.plugin_api.sizes import shown_bytes
from kvtier.tools.checking.findings import Finding
from kvtier.tools.checking.rules import CAPACITY_ABOVE_FILESYSTEM, NOT_MOUNTED, RELATIVE_PATH
from kvtier_backends.posix import filesystem_of, nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtier.settings.runtime_config import TierConfig

CAPACITY: Final = "capacity_bytes"
ROOT: Final = "/"


def doubts_of_place(config: TierConfig, place: str) -> Iterator[Finding]:
    """Yield warnings about a tier's folder. May hang."""
    options = config.options
    key = next((key for key in options if _is_path(options, key, place)), None)
    above = nearest(place)[0]
    usage = os.statvfs(above)
    size, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
    if key is not None:
        given = f"{key}={shown(options[key])}"
        if not str(options[key]).startswith(("/", "~", "$")):
            yield Finding(
                RELATIVE_PATH,
                f"{given} is relative, and begins in the folder in which the engine is started: "
                f"here that is {place}.",
                "Write the full path.",
            )
        bare = _bare_folder(place, above)
        if bare is not None:
            yield Finding(
                NOT_MOUNTED,
                f"{given}: {bare} on this host, so an engine would write to the root filesystem "
                f"({shown_bytes(free)} of {shown_bytes(size)} free).",
                "If a disk belongs there, mount it first.",
            )
    capacity = capacity_of(options)
    if size and capacity > size:  # some filesystems report none
        yield Finding(
            CAPACITY_ABOVE_FILESYSTEM,
            f"{CAPACITY}={shown(options[CAPACITY])} is more than the filesystem has at {above} on "
            f"this host, {shown_bytes(size)}: an engine would start, and use what room it finds.",
            "Lower it.",
        )


def _bare_folder(place: str, above: str) -> str | None:
    """Return a folder that looks like a missing mount; None if there is none.

    ``above``: the existing part of the place.
    """
    if filesystem_of(above) != filesystem_of(ROOT):
        return None
    missing = Path(place).relative_to(above).parts
    if len(missing) > 1 or (missing and above == ROOT):  # users make all but the last one
        return f"{Path(above, missing[0])} does not exist"
    is_empty = next(Path(above).iterdir(), None) is None
    return f"{above} is empty, and nothing is mounted there" if is_empty else None


def _is_path(options: Mapping[str, object], key: str, place: str) -> bool:
    try:
        return os.path.realpath(Options(options, "").path(key)) == place
    except ConfigError:
        return False


def capacity_of(options: Mapping[str, object]) -> int:
    """Return the bytes that a tier may hold; 0 if the key is missing or not sound."""
    try:
        return Options(options, "").size(CAPACITY, 0)
    except ConfigError:
        return 0
