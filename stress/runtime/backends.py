"""The backends of a soak: kvtier's own, which can be told to do wrong, and count it.

They are found by their entry points (``stress/plugins``), as a third party's are, so that they
run in threads and processes of kvtier's own making.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import anyio

from kvtier_backends.disk.backend import DiskBackend
from kvtier_backends.faults import FaultScript, OperationFaults
from kvtier_backends.memory import MemoryBackend

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtier.plugin_api.backend import BackendContext, LoadBlock, Loaded, Outcome, StoreBlock
    from kvtier_backends.disk.disk_options import DiskOptions
    from kvtier_backends.disk.folder.claim import Claim
    from kvtier_backends.disk.folder.opening import Verdict

HANG_POLL_S: Final = 0.02
_SECONDS: Final = struct.Struct("d")
CLOCK_FILE: Final = "KVTIER_STRESS_CLOCK"
"""The environment variable with the name of a file: by how many seconds wall clocks are wrong."""


KEYS_FOLDER: Final = "KVTIER_STRESS_KEYS"
"""The environment variable with the folder in which a ``disk`` tier tells its keys."""


@dataclass
class CountedFaults(OperationFaults):
    """Faults of one operation that count what they have really done."""

    kind: str = "none"
    injected: Counter[str] = field(default_factory=Counter)

    def next_call(self) -> bool:
        """Count a call that is to be delayed, raise, leave out answers or find no room."""
        hit = super().next_call()
        if self.delay_s or self.error or self.answers_missing or self.full:
            self.injected[self.kind] += hit
        return hit

    def next_block(self, key: bytes) -> tuple[bool, bool]:
        """Count a block that is to fail or to be corrupted."""
        found = super().next_block(key)
        self.injected[self.kind] += any(found)
        return found


class SoakedMemory(MemoryBackend):
    """A ``memory`` tier whose operations also hang, for as long as they are told to."""

    type_name: ClassVar[str] = "stress_memory"
    _latest: ClassVar[weakref.ref[SoakedMemory] | None] = None

    def __init__(
        self, context: BackendContext, capacity_blocks: int, faults: FaultScript | None = None
    ) -> None:
        super().__init__(context, capacity_blocks, faults)
        self.hanging: set[str] = set()
        self.hung: Counter[str] = Counter()
        SoakedMemory._latest = weakref.ref(self)

    @classmethod
    def latest(cls) -> SoakedMemory:
        """Return the one that was made last. It must not be kept: it holds a whole runtime."""
        found = None if cls._latest is None else cls._latest()
        assert found is not None, "no memory tier"
        return found

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """As told, then as a memory tier."""
        await self._hang("probe")
        return await super().probe(keys)

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """As told, then as a memory tier."""
        await self._hang("load")
        return await super().load(blocks)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """As told, then as a memory tier."""
        await self._hang("store")
        return await super().store(blocks)

    async def remove(self, keys: Sequence[bytes]) -> None:
        """As told, then as a memory tier."""
        await self._hang("remove")
        await super().remove(keys)

    def keys(self) -> set[bytes]:
        """Return the keys of all blocks that are there, as the backend calls them."""
        return set(self._kept)

    async def _hang(self, operation: str) -> None:
        self.hung["hang"] += operation in self.hanging
        while operation in self.hanging:  # noqa: ASYNC110 - another thread ends it
            await anyio.sleep(HANG_POLL_S)


class SoakedDisk(DiskBackend):
    """A ``disk`` tier on a wall clock that jumps."""

    type_name: ClassVar[str] = "stress_disk"

    def __init__(
        self, context: BackendContext, claim: Claim, verdict: Verdict, given: DiskOptions
    ) -> None:
        _wrong_by()
        super().__init__(context, claim, verdict, given, clock=wrong_time)

    async def tick(self) -> None:
        """Keep up, and tell which blocks there are when a soak asks."""
        await super().tick()
        write_keys(self.contents())


def write_keys(keys: Iterable[Sequence[bytes]]) -> None:
    """Write down which blocks a ``disk`` tier has, if that is asked for and was not done yet."""
    with suppress(OSError):
        wanted, answer = keys_files(Path(os.environ[KEYS_FOLDER]))
        nonce = wanted.read_text()
        if not answer.exists() or not answer.read_text().startswith(f"{nonce}\n"):
            lines = [nonce, *(key.hex() for batch in keys for key in batch)]
            new = answer.with_suffix(".new")
            new.write_text("".join(f"{line}\n" for line in lines))
            new.replace(answer)


def keys_files(folder: Path) -> tuple[Path, Path]:
    """Return the file that asks for a ``disk`` tier's keys, and the one with the answer."""
    return folder / "keys-wanted", folder / "keys"


def set_wrong_by(file: Path, seconds: float) -> None:
    """Have the clocks of all processes that look at ``file`` be wrong by so much."""
    with file.open("r+b" if file.exists() else "wb") as opened:
        opened.write(_SECONDS.pack(seconds))


@cache  # opened once: later there may be no descriptor left for it
def _wrong_by() -> mmap.mmap:
    with Path(os.environ[CLOCK_FILE]).open("rb") as file:
        return mmap.mmap(file.fileno(), _SECONDS.size, prot=mmap.PROT_READ)


def wrong_time() -> float:
    """Return seconds since 1970, by a clock that is wrong by as much as the file says."""
    (wrong_by_s,) = _SECONDS.unpack(_wrong_by())
    return time.time() + float(wrong_by_s)
