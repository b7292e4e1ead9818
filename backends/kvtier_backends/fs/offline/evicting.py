"""Evicts a folder down to a bound once: for folders without a cleaner, such as vLLM's own.

It takes no part in the protocol and waits for nothing: engines with a bound of their own find
some blocks gone, as after any removal, and are notified.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.offline import Shrunk
from kvtier.plugin_api.threads import BoundedCall
from kvtier_backends.fs.bound.account import Manifest
from kvtier_backends.fs.bound.eviction import evict, scan
from kvtier_backends.fs.bound.protocol import (
    KNOWN,
    MANIFEST,
    SMALL_FILE_BYTES_MAX,
    SPACE,
    ManifestHead,
    RecordDamaged,
    Timing,
    decode_array_untrusted,
    decode_untrusted,
)
from kvtier_backends.fs.bound.removals import Removals
from kvtier_backends.fs.bound.small_files import DaemonExecutor, SmallFiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.progress import ShowProgress
    from kvtier_backends.fs.offline.inspection import FsFolder

_VICTIMS_AT_ONCE: Final = 1024
_ANSWER_S_MAX: Final = 20.0
_NUMBERS: Final = 10**10
_EPOCHS_WITHOUT_USES: Final = 1 << 30


def evict_to(folder: FsFolder, capacity: int, progress: ShowProgress) -> Shrunk:
    """Remove the least recently used blocks until the folder holds no more than ``capacity``.

    Uses reported by engines count; otherwise the times of the files do. Raises ``OSError``;
    Ctrl-C leaves the rest as it is.
    """
    uses = _known_uses(folder)
    epoch = _EPOCHS_WITHOUT_USES if uses is None else int(uses.entries["epoch"].max(initial=0))
    with progress("looking at blocks", folder.parts()) as bar:
        scanned = scan(folder.walk(bar.advance), epoch, Timing().epoch_s)
    manifest = Manifest(scanned.known)
    if uses is not None:
        manifest.with_epochs_of(uses)
    over = manifest.bytes + scanned.others - capacity
    victims = manifest.oldest(over, len(manifest)) if over > 0 else manifest.entries[:0]
    removed_blocks = removed_bytes = failed = 0
    reason, is_complete = "", False
    with suppress(KeyboardInterrupt), progress("removing", len(victims)) as bar:
        for start in range(0, len(victims), _VICTIMS_AT_ONCE):
            batch = victims[start : start + _VICTIMS_AT_ONCE]
            evicted = evict(folder.root, batch)
            removed_blocks += len(evicted.names)
            removed_bytes += evicted.bytes
            failed += len(batch) - len(evicted.numbers)
            if evicted.failed is not None:
                reason = evicted.failed.strerror or str(evicted.failed)
            announce(folder, evicted.names)
            bar.advance(len(batch))
        is_complete = True
    return Shrunk(
        blocks=len(manifest),
        bytes=manifest.bytes,
        other_bytes=scanned.others,
        blocks_removed=removed_blocks,
        bytes_removed=removed_bytes,
        blocks_failed=failed,
        reason=reason,
        is_complete=is_complete,
    )


def announce(folder: FsFolder, names: Sequence[str]) -> None:
    """Publish removed block files to the engines that bound the folder. Raises nothing."""
    if names and os.path.isdir(f"{folder.path}/{SPACE}"):
        with suppress(OSError):
            call = BoundedCall(lambda: asyncio.run(_announce(folder, names)), "announce")
            if call.wait(_ANSWER_S_MAX):
                call.result()


async def _announce(folder: FsFolder, names: Sequence[str]) -> None:
    executor = DaemonExecutor(1, "announce")
    try:
        mode = stat.S_IMODE(os.fstat(folder.root).st_mode) & 0o775
        space = await SmallFiles(os.dup(folder.root), executor, mode).open_folder(SPACE)
        removals = Removals()
        await removals.begin(space, 0, secrets.randbelow(_NUMBERS))
        removals.note(names)
        await removals.announce(space)
    finally:
        executor.shutdown()


def _known_uses(folder: FsFolder) -> Manifest | None:
    """Return the manifest of the last cleaner, None if no readable one exists."""
    with suppress(OSError, RecordDamaged):
        with open(f"{folder.path}/{SPACE}/{MANIFEST}", "rb") as file:
            known, head = decode_array_untrusted(file.read(SMALL_FILE_BYTES_MAX), KNOWN)
        decode_untrusted(head, ManifestHead)
        return Manifest(known.copy())
    return None
