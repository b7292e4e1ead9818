"""The runtime layer: the facade, real tiers, real threads, processes and files."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from kvtier_backends.fs.temporary import MARKERS_NAME, parse_temporary_untrusted
from kvtier_backends.fs.unfinished import folders_untrusted
from stress.contents import BLOCK_BYTES
from stress.runtime import clocks, files, memory_faults, processes
from stress.runtime.in_process import ENGINE_KINDS, TIMEOUTS, InProcess
from stress.runtime.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from stress.layer import Injector
    from stress.plan import Kind
    from stress.record import Record

FS, DISK = "2:fs", "3:stress_disk"


class RuntimeLayer(InProcess):
    """A memory tier, an ``fs`` tier and a ``disk`` tier, over an ordinary folder."""

    name: ClassVar[str] = "runtime"
    requests_min: ClassVar[int] = 10_000
    blocks_read_min: ClassVar[int] = 30_000
    kinds: ClassVar[tuple[Kind, ...]] = (
        *ENGINE_KINDS,
        *memory_faults.KINDS,
        *files.kinds((FS, DISK)),
        *processes.kinds((FS, DISK)),
        *clocks.KINDS,
    )

    @contextmanager
    def world(self, folder: Path, record: Record) -> Iterator[None]:
        """Make the folders."""
        self._folders = {FS: folder / "fs", DISK: folder / "disk"}
        aside = folder / "aside"
        aside.mkdir()
        self._clocks = clocks.Clocks(folder)
        faults: Sequence[tuple[Sequence[Kind], Injector]] = (
            (memory_faults.KINDS, memory_faults.MemoryFaults(record.injected)),
            (files.kinds(()), files.FolderFaults(self._folders, aside)),
            (processes.kinds(()), processes.ProcessFaults()),
            (clocks.KINDS, self._clocks),
        )
        self.who_does = {kind.name: does for kinds, does in faults for kind in kinds}
        self.sweeping = Swept(self._folders[FS])
        self.residency = Residency(self._folders[FS], folder)
        yield

    def tiers(self, seed: int, policy: str) -> list[dict[str, Any]]:
        """Return the settings of the tiers."""
        del seed
        common = {**TIMEOUTS, "enable_kv_events": True, "on_unusable": "skip"}
        return [
            {
                "type": "stress_memory",
                "capacity_bytes": 96 * BLOCK_BYTES,
                "eviction_policy": policy,
                **common,
            },
            {
                "type": "fs",
                "root_dir": str(self._folders[FS]),
                "n_read_threads": 4,
                "n_write_threads": 4,
                **common,
            },
            {
                "type": "stress_disk",
                "path": str(self._folders[DISK]),
                "capacity_bytes": 2048 * BLOCK_BYTES,
                **common,
            },
        ]

    def clock(self) -> float:
        """Return a time that leaps."""
        return self._clocks.monotonic()


class Swept:
    """The ``fs`` tier, as one that sweeps what its killed writers left."""

    tier: ClassVar[str] = FS

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def kill(self) -> None:
        """Kill its processes."""
        for pid in processes.tier_processes(self.tier):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def leave_unfinished(self) -> None:
        """Put a temporary file into some fan-out folder, by the name of each writer there is.

        Into one that its marker names; if there is none, as an older kvtier did, which named none.
        """
        for marker in list(self._folder.glob(f"*/{MARKERS_NAME}/*")):
            base = marker.parents[1]
            named = folders_untrusted(marker.read_bytes()) or set()
            there = [base / name for name in sorted(named) if (base / name).is_dir()]
            if not there:
                os.truncate(marker, 0)
            for fan_out in islice(there or base.glob("???/??"), 1):
                (fan_out / f"unfinished.{marker.name}-0.tmp").touch()

    def leftovers(self) -> Sequence[str]:
        """Return the names of blocks that are only written so far, by whoever."""
        return [
            name
            for _, _, names in os.walk(self._folder)
            for name in names
            if parse_temporary_untrusted(name) is not None
        ]
