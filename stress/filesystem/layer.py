"""The filesystem layer: the runtime's tiers over a filesystem that hangs, fails and lies.

It is done to a running engine, to one that starts and to one that ends: engines end and start
again all the time, whatever goes on.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from stress.failure import Failure
from stress.filesystem import faults
from stress.filesystem.fuse_folder import why_no_fuse
from stress.limits import PATIENCE_S
from stress.plan import Kind
from stress.runtime import files, processes
from stress.runtime.layer import DISK, FS, RuntimeLayer
from stress.runtime.residency import Residency
from stress.runtime.rest import Swept

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stress.plan import Fault
    from stress.record import Record
    from stress.runtime.session import Session

START_S: Final = 20.0
"""So long a start waits for storage that hangs. A new process alone takes a second or two, on a
busy machine ten."""

TIERS: Final = (FS, DISK)
KNOWN_BY: Final = frozenset({"superblock"})
"""Under another device number, a folder without it is somebody else's, until an engine starts."""


class FilesystemLayer(RuntimeLayer):
    """Two tiers over FUSE, and a memory tier that must go on all the while."""

    name: ClassVar[str] = "filesystem"
    requests_min: ClassVar[int] = 5_000
    blocks_read_min: ClassVar[int] = 15_000
    hangs_at_close: ClassVar[bool] = True
    kinds: ClassVar[tuple[Kind, ...]] = (
        Kind("reset", ("unnamed", "named", "named_again"), per_minute=10),
        Kind("reopen", ("engine",), per_minute=4),
        Kind("harm_files", TIERS, per_minute=60),
        Kind("kill", TIERS, per_minute=2),
        Kind("stop", TIERS, per_minute=2, spell_s=(0.1, 3.0)),
        *faults.KINDS,
    )

    @contextmanager
    def world(self, folder: Path, record: Record) -> Iterator[None]:
        """Mount the filesystem. Raises ``Failure`` where there is no FUSE."""
        if remedy := why_no_fuse():
            raise Failure(f"this layer needs FUSE: {remedy}")
        source, mount, aside = folder / "source", folder / "mounted", folder / "aside"
        for each in (source, mount):
            each.mkdir(mode=0o700)
        self._filesystem = filesystem = faults.FilesystemFaults(
            source, mount, record.injected, TIERS
        )
        try:
            _wait_for(filesystem)
            with super().world(folder, record):
                self._folders = {FS: mount / "fs", DISK: mount / "disk"}
                self.sweeping = Swept(FS, source / "fs")
                self.residency = Residency(source / "fs", folder)
                # Harm is done below the mount: who looks into it would hang as well.
                folders = {FS: source / "fs", DISK: source / "disk"}
                below = files.FolderFaults(folders, aside, spared=KNOWN_BY)
                self.who_does = {
                    "harm_files": below,
                    **dict.fromkeys(("kill", "stop"), processes.ProcessFaults()),
                    **{kind.name: filesystem for kind in faults.KINDS},
                }
                yield
        finally:
            filesystem.unmount()

    def may_begin(self, fault: Fault, session: Session) -> bool:
        """Tell whether a fault may begin: an engine that starts knows no filesystem from before.

        Over a bare mount point it would make its folders there, as it should.
        """
        if fault.kind == "fs_vanish":
            return session.opened.issuperset(session.tiers)
        return fault.kind != "reopen" or not self._filesystem.is_away

    def tiers(self, seed: int, policy: str) -> list[dict[str, Any]]:
        """Return those of the runtime layer, with a start that doesn't wait for long."""
        return [{**tier, "start_timeout_s": START_S} for tier in super().tiers(seed, policy)]


def _wait_for(filesystem: faults.FilesystemFaults) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not filesystem.is_ready():
        if time.monotonic() > end_s:
            raise Failure(f"FUSE has mounted nothing within {PATIENCE_S:g} s")
        time.sleep(0.05)
