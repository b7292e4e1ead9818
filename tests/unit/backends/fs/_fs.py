"""What the tests of the fs backend share: a context, and blocks in and out of it."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.plugin_api.backend import (
    BackendContext,
    LoadBlock,
    Loaded,
    Namespace,
    Outcome,
    StoreBlock,
    block_digest,
)
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier_backends.fs import FsBackend
from tests.unit.backends._media import key_of as key_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BLOCK_BYTES = 16384
FILE_BYTES = BLOCK_BYTES + 4096
ODD_NAMES = (
    b"\xff.kv",
    b"\xed\xa0\x80.bin",
    b"a\nb.kv",
    b"\r.kv",
    "\x85\u2028.kv".encode(),
    b" '.kv",
)
"""Of files that somebody else may put beside blocks: no text, or more than one line of it."""

CONTEXT = BackendContext(
    BLOCK_BYTES,
    Namespace({"model_name": "org/m", "dtype": "bf16"}, {"model_name": "org/m", "tp_size": 1}, 0),
    "1:fs",
)


def data_of(number: int) -> bytes:
    return (number % 251).to_bytes(1, "big") * (BLOCK_BYTES - 1) + b"\n"


class Fs:
    """An open backend, one slot, and shorthand."""

    def __init__(self, backend: FsBackend) -> None:
        self.backend = backend
        self.slots = SlotMemory.anonymous(64, BLOCK_BYTES)
        self.next_slot = 0

    def view(self) -> memoryview:
        self.next_slot = (self.next_slot + 1) % 64
        return self.slots.view(self.next_slot)

    async def store(self, number: int) -> Outcome:
        view = self.view()
        view[:] = data_of(number)
        key = key_of(number)
        (outcome,) = await self.backend.store([StoreBlock(key, view, block_digest(key, view))])
        return outcome

    async def load(self, number: int) -> Outcome:
        """Load, and insist that what is DONE is right, as the layer above would."""
        view = self.view()
        view[:] = bytes(BLOCK_BYTES)
        (loaded,) = await self.backend.load([LoadBlock(key_of(number), view)])
        if loaded.outcome is Outcome.DONE:
            assert view == data_of(number)
            assert loaded == Loaded(Outcome.DONE, block_digest(key_of(number), view))
        return loaded.outcome

    async def probe(self, number: int) -> bool:
        return (await self.backend.probe([key_of(number)]))[0]

    def path(self, number: int) -> Path:
        return Path(self.backend._files._layout.path(key_of(number)))

    def count(self, name: str) -> int:
        return self.backend.counters().get(name, 0)

    def temporaries(self) -> list[Path]:
        return sorted(Path(self.backend.place).rglob("*.tmp"))


def make_fs(root: Path | str, context: BackendContext = CONTEXT, **options: Any) -> FsBackend:
    return FsBackend.from_options({"root_dir": os.fspath(root), **options}, context)


@asynccontextmanager
async def open_fs(
    root: Path | str, context: BackendContext = CONTEXT, **options: Any
) -> AsyncIterator[Fs]:
    backend = make_fs(root, context, **options)
    await backend.open()
    try:
        yield Fs(backend)
    finally:
        await backend.close()
