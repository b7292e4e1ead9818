"""The faults that alerts are for, done to the tiers of a running engine, and taken back."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from stress.monitored.engine import DISK
from stress.runtime.files import some_files
from stress.runtime.processes import tier_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from stress.filesystem.volume import Volume
    from stress.remote.valkey_server import ValkeyServer

FILES_DAMAGED: Final = 400


class Fault(NamedTuple):
    """One fault. Each of ``alerts`` must fire while it lasts."""

    about: str
    alerts: tuple[str, ...]
    begin: Callable[[], object]
    again: Callable[[], object]  #: between any two requests
    end: Callable[[], object]


def nothing() -> None:
    """Do nothing."""


def faults_of(shared: Path, volume: Volume | None, server: ValkeyServer) -> Mapping[str, Fault]:
    """Return the faults by name; a full filesystem only where one may be mounted."""
    away = shared.with_name("away")
    found = {
        "hung": Fault(
            "a `disk` tier's process is stopped (`SIGSTOP`)",
            ("KvtierTierBypassed", "KvtierStorageHangs", "KvtierMemoryHeld"),
            lambda: _signal(DISK, signal.SIGSTOP),
            nothing,
            lambda: _signal(DISK, signal.SIGCONT),
        ),
        "killed": Fault(
            "a `disk` tier's process is killed whenever it is back",
            ("KvtierTierCrashes", "KvtierTierDisabled"),
            nothing,
            lambda: _signal(DISK, signal.SIGKILL),
            nothing,
        ),
        "damaged": Fault(
            "files of an `fs` tier have a bit that is wrong",
            ("KvtierBlocksDamaged",),
            lambda: _damage(shared),
            nothing,
            nothing,
        ),
        "lost": Fault(
            "the folder of an `fs` tier is moved away",
            ("KvtierTierBypassed",),
            lambda: shared.rename(away),
            nothing,
            lambda: away.rename(shared),
        ),
        "server": Fault(
            "a `redis` tier's server ends",
            ("KvtierServerGone",),
            server.kill,
            nothing,
            server.start,
        ),
    }
    if volume is not None:
        found["full"] = Fault(
            "the filesystem of an `fs` tier is full",
            ("KvtierStorageFull",),
            lambda: volume.leave(room_bytes=1),
            nothing,
            volume.leave,
        )
    return found


def _signal(tier: str, number: signal.Signals) -> None:
    for pid in tier_processes(tier):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _damage(folder: Path) -> None:
    for path in some_files(folder, random.Random(0), FILES_DAMAGED, frozenset()):
        with suppress(OSError), path.open("r+b") as file:
            file.seek(1_000)
            byte = file.read(1)
            file.seek(1_000)
            file.write(bytes([byte[0] ^ 1]))
