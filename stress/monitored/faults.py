"""The faults that alerts are for, done to the tiers of a running engine, and taken back."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.tools.demo.engine import BLOCK_BYTES
from stress.monitored.engine import DISK
from stress.runtime.files import NAMESPACE_FILE, some_files
from stress.runtime.processes import tier_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stress.filesystem.volume import Volume
    from stress.remote.valkey_server import ValkeyServer

LIVES_S: Final = 3.0
FILES_AT_ONCE: Final = 40


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
    dice = random.Random(0)
    found = {
        "hung": Fault(
            "a `disk` tier's process is stopped (`SIGSTOP`)",
            ("KvtierTierBypassed", "KvtierStorageHangs", "KvtierMemoryHeld"),
            lambda: _signal(DISK, signal.SIGSTOP),
            nothing,
            lambda: _signal(DISK, signal.SIGCONT),
        ),
        "crashes": Fault(
            f"a `disk` tier's process is killed whenever it is {LIVES_S:g} s old",
            ("KvtierTierCrashes",),
            nothing,
            lambda: _signal(DISK, signal.SIGKILL, LIVES_S),
            nothing,
        ),
        "killed": Fault(
            "a `disk` tier's process is killed before it is ready, again and again",
            ("KvtierTierDisabled",),
            nothing,
            lambda: _signal(DISK, signal.SIGKILL),
            nothing,
        ),
        "damaged": Fault(
            "bits of an `fs` tier's files are wrong",
            ("KvtierBlocksDamaged",),
            nothing,
            lambda: _damage(shared, dice),
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


def _signal(tier: str, number: signal.Signals, age_s: float = 0.0) -> None:
    """Send a signal to the processes of a tier that are so old."""
    for pid in tier_processes(tier):
        with suppress(ProcessLookupError, FileNotFoundError):
            if time.time() - Path(f"/proc/{pid}").stat().st_ctime >= age_s:
                os.kill(pid, number)


def _damage(folder: Path, dice: random.Random) -> None:
    """Turn a bit of some files, each time another one."""
    for path in some_files(folder, dice, FILES_AT_ONCE, frozenset({NAMESPACE_FILE})):
        with suppress(OSError), path.open("r+b") as file:
            at = dice.randrange(BLOCK_BYTES)
            file.seek(at)
            byte = file.read(1)
            if byte:
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
