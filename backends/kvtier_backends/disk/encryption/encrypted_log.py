"""Puts encryption between the log and its callers: the log sees only encrypted blocks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import LoadBlock, Loaded, Outcome, StoreBlock
from kvtier.plugin_api.threads import DaemonThreads
from kvtier_backends.disk.encryption.transit_memory import TRANSIT_BYTES_MAX, TransitMemory
from kvtier_backends.disk.format import namespace_digest
from kvtier_backends.encryption.cipher import BlockCipher, EncryptedBlock
from kvtier_backends.encryption.keys import (
    ENCRYPTION_KEY,
    read_keyring,
    refuse_missing_package,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtier.plugin_api.backend import BackendContext
    from kvtier.plugin_api.options import Options
    from kvtier_backends.disk.log.block_log import BlockLog
    from kvtier_backends.disk.log.reader import Encryption

T = TypeVar("T")

ENCRYPTION_THREADS: Final = 2
"""Encryption runs without the GIL, at a few GB/s a thread."""


class _Transit(NamedTuple):
    """Memory for the calls of one log; calls that hang in an earlier log keep none of it.

    Each direction has its own: stores may wait for the end of loads.
    """

    stores: TransitMemory
    loads: TransitMemory


class EncryptedLog:
    """Encrypts stored blocks, in threads of its own, and decrypts loaded ones as they are read."""

    def __init__(self, cipher: BlockCipher, name: str) -> None:
        self.keyring = cipher.keyring
        self._cipher = cipher
        self._threads = DaemonThreads(ENCRYPTION_THREADS, f"{name}-encrypt")
        # Weakly: a folder that is gone and comes back gets a new log.
        self._transits: WeakKeyDictionary[BlockLog, _Transit] = WeakKeyDictionary()
        self._is_stopped = False

    async def store(self, log: BlockLog, blocks: Sequence[StoreBlock]) -> list[Outcome]:
        """Encrypt the blocks that are not stored yet, and append them."""
        fresh = [block for block in blocks if not log.has(block.key)]
        if not fresh:
            return [Outcome.DONE] * len(blocks)
        async with self._transit(log).stores.borrow(len(fresh)) as memory:
            tags = await self._run(partial(self._encrypt, fresh, memory))
            encrypted = [
                StoreBlock(block.key, view[: block.buffer.nbytes], digest)
                for block, view, (_, digest) in zip(fresh, memory, tags, strict=True)
            ]
            outcomes = await log.store(encrypted, [tag for tag, _ in tags])
        outcome_of = dict(zip((block.key for block in fresh), outcomes, strict=True))
        return [outcome_of.get(block.key, Outcome.DONE) for block in blocks]

    async def load(self, log: BlockLog, blocks: Sequence[LoadBlock]) -> list[Loaded]:
        """Read the encrypted blocks, and decrypt each into its buffer in the thread that read it.

        Behind another thread, decryption would find the bytes out of the processor's cache.
        """
        encryption: dict[bytes, Encryption] = {}
        digests: list[bytes | None] = [None] * len(blocks)
        async with self._transit(log).loads.borrow(len(blocks)) as memory:

            def decrypt(place: int) -> None:
                block = blocks[place]
                tag, key_id, digest = encryption[block.key]
                encrypted = EncryptedBlock(block.key, key_id, tag, digest)
                digests[place] = self._cipher.decrypt(memory[place], encrypted, block.buffer)
                if block.on_read is not None:
                    block.on_read()

            both = zip(blocks, memory, strict=True)
            encrypted_blocks = [
                LoadBlock.with_report(key, view[: buffer.nbytes], partial(decrypt, place))
                for place, ((key, buffer), view) in enumerate(both)
            ]
            answers = await log.load(encrypted_blocks, encryption)
        for place, answer in enumerate(answers):
            if answer.outcome is Outcome.DONE:
                digest = digests[place]
                answers[place] = (
                    Loaded(Outcome.DAMAGED) if digest is None else Loaded(Outcome.DONE, digest)
                )
        return answers

    def _transit(self, log: BlockLog) -> _Transit:
        transit = self._transits.get(log)
        if transit is None:
            transit = _Transit(TransitMemory(self._cipher), TransitMemory(self._cipher))
            self._transits[log] = transit
        return transit

    def _encrypt(
        self, blocks: Sequence[StoreBlock], memory: Sequence[memoryview]
    ) -> list[tuple[bytes, bytes]]:
        """Return the tag and the masked digest of each block."""
        encrypt = self._cipher.encrypt
        both = zip(blocks, memory, strict=True)
        return [encrypt(key, buffer, digest, into) for (key, buffer, digest), into in both]

    async def _run(self, call: Callable[[], T]) -> T:
        if self._is_stopped:
            # Nothing would ever run it.
            raise StoreFault("the tier is closed")
        return await self._threads.run(call)

    def busy(self) -> int:
        """Count the calls, besides the log's, that may still touch a block's buffer. Any thread."""
        return self._threads.busy()

    def stop(self) -> None:
        """Let the threads end."""
        self._is_stopped = True
        self._threads.stop()


def make_encrypted_log(reader: Options, context: BackendContext) -> EncryptedLog | None:
    """Read the keys that the options name, if any. Raises ``ConfigError``."""
    keyring = read_keyring(reader, ENCRYPTION_KEY)
    if keyring is None:
        return None
    try:
        cipher = BlockCipher(
            keyring,
            namespace_digest(context),
            context.block_bytes,
            kept_bytes_max=2 * TRANSIT_BYTES_MAX,
        )
    except ImportError:
        raise refuse_missing_package(reader, ENCRYPTION_KEY) from None
    return EncryptedLog(cipher, context.tier_name)
