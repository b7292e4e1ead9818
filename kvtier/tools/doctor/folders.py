"""Rules of a tier's folder: its place, its free space and its owner.

Called in a thread that may hang as the storage does; see ``check_tiers``.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.options import shown
from kvtier.plugin_api.sizes import shown_bytes
from kvtier.tools.bench.plain_files import takes_direct
from kvtier.tools.checking.findings import Finding
from kvtier.tools.checking.places import CAPACITY, capacity_of, doubts_of_place
from kvtier.tools.checking.rules import (
    CAPACITY_ABOVE_FREE,
    DISK_ON_NETWORK,
    FOLDER_IN_CONTAINER,
    FOLDER_IN_MEMORY,
    FOLDER_OF_ANOTHER,
    LISTED_BY_ALL,
    NO_DIRECT,
    OPEN_TO_PLANTING,
    OTHER_FORMATS,
)
from kvtier.tools.doctor.namespaces import namespaces_apart
from kvtier_backends.encryption.keys import AUTH_KEY, ENCRYPTION_KEY
from kvtier_backends.fs.offline.inspection import (
    LAYOUT_OF_KVTIER,
    LAYOUT_OF_VLLM,
    FsFolder,
    format_of,
)
from kvtier_backends.posix import nearest
from kvtier_backends.shared.namespaces import facts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtier.settings.runtime_config import TierConfig
    from kvtier.tools.doctor.subject import Machine

IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
OF_CONTAINER: Final = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})
OF_NETWORK: Final = frozenset(
    [
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.glusterfs",
        "fuse.sshfs",
        "gfs2",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "smb3",
        "wekafs",
    ]
)
FILES_MAX: Final = 10_000
"""The most files of a folder that are counted."""

KEYS: Final = tuple(
    f"{kind}_{place}" for kind in (AUTH_KEY, ENCRYPTION_KEY) for place in ("file", "env")
)
VLLM: Final = "vllm"


def look_at_folder(config: TierConfig, place: str, machine: Machine) -> Iterator[Finding]:
    """Yield findings about a tier's folder. May hang."""
    doubts = list(doubts_of_place(config, place))
    yield from doubts
    try:
        above, found = nearest(place)
    except OSError:  # refused already
        return
    yield from _filesystem(config, place, machine.filesystem_of(above))
    if not config.read_only and config.options.get("direct", True) is True:
        yield from _direct(place, above)
    if not config.read_only and not any(each.what.startswith(CAPACITY) for each in doubts):
        yield from _room(config.options, place, above)
    if above == place:
        yield from _modes(config.options, place, found)
        if config.type == "fs":
            yield from _contents(config.options, place)


def _filesystem(config: TierConfig, place: str, kind: str) -> Iterator[Finding]:
    if kind in IN_MEMORY:
        yield Finding(
            FOLDER_IN_MEMORY,
            f"{place} is on {kind}, which is memory.",
            "Name a folder on a disk, or give its size to cpu_bytes_to_use and remove the tier.",
        )
    elif kind in OF_CONTAINER:
        yield Finding(
            FOLDER_IN_CONTAINER,
            f"{place} is on {kind}, a container's own layer.",
            "Mount a volume there: docker run -v, or a hostPath or persistent volume.",
        )
    elif kind in OF_NETWORK and config.type == "disk":
        yield Finding(
            DISK_ON_NETWORK,
            f"{place} is on {kind}, across a network.",
            'Name a folder on a local disk; for a network filesystem, use a tier of type "fs".',
        )


def _direct(place: str, above: str) -> Iterator[Finding]:
    with suppress(OSError):  # no file can be made here: refused already
        if not takes_direct(above):
            yield Finding(
                NO_DIRECT,
                f"the filesystem of {place} does not take O_DIRECT.",
                'Name a folder on ext4 or xfs; or set "direct" to false, if that is meant.',
            )


def _room(options: Mapping[str, object], place: str, above: str) -> Iterator[Finding]:
    capacity = capacity_of(options)
    usage = os.statvfs(above)
    free = usage.f_bavail * usage.f_frsize
    held = _held_bytes(place) if usage.f_blocks and capacity > free else None
    if held is not None and capacity - held > free:
        yield Finding(
            CAPACITY_ABOVE_FREE,
            f"{CAPACITY}={shown(options[CAPACITY])} is more than the {shown_bytes(free)} that are "
            f"free at {above} and the {shown_bytes(held)} that the folder has.",
            f"Free some, or lower {CAPACITY}.",
        )


def _held_bytes(place: str) -> int | None:
    """Return the bytes of a folder's files on disk; None for more files than can be counted."""
    held = count = 0
    for folder, _, names in os.walk(place):
        for name in names:
            count += 1
            if count > FILES_MAX:
                return None
            with suppress(OSError):
                held += Path(folder, name).lstat().st_blocks * 512
    return held


def _modes(options: Mapping[str, object], place: str, found: os.stat_result) -> Iterator[Finding]:
    groups = {os.getegid(), *os.getgroups()}
    is_of_group = bool(found.st_mode & stat.S_IWGRP) and found.st_gid in groups
    if found.st_uid != os.geteuid() and not is_of_group:
        yield Finding(
            FOLDER_OF_ANOTHER,
            f"{place} belongs to user {found.st_uid}, and this is user {os.geteuid()}.",
            "Run the doctor as the engine's user. If this is it, name a folder of its own, or let "
            "the users share one by a group: chmod -R g+rwX, and umask 007.",
        )
    if found.st_mode & stat.S_IWOTH and not any(key in options for key in KEYS):
        yield Finding(
            OPEN_TO_PLANTING,
            f"anyone may write to {place}, and no key signs or encrypts the blocks.",
            "Run chmod o-w on it, or give the tier auth_key_file or encryption_key_file.",
        )
    elif found.st_mode & stat.S_IROTH:
        yield Finding(
            LISTED_BY_ALL,
            f"{place} has mode {stat.S_IMODE(found.st_mode):04o}: anyone may list it.",
            "Run chmod o-rwx on it, unless others are to look into it.",
        )


def _contents(options: Mapping[str, object], place: str) -> Iterator[Finding]:
    """Yield differences of namespaces of the same model, and namespaces that it can't read."""
    with suppress(ConfigError, OSError), FsFolder(place) as folder:
        found = folder.namespaces
        yield from namespaces_apart(place, map(facts_of, found.values()))
        read = LAYOUT_OF_VLLM if options.get("layout") == VLLM else LAYOUT_OF_KVTIER
        others = Counter(kind for each in found.values() if (kind := format_of(each)) != read)
        if others:
            counted = ", ".join(f"{kind}: {count}" for kind, count in others.most_common())
            yield Finding(
                OTHER_FORMATS,
                f"{place} has namespaces of another format than this tier's, {read} ({counted}).",
                'To use them, go back to that version, or set "layout" to "vllm" for vLLM\'s own; '
                "kvtier purge removes those that no engine uses.",
            )
