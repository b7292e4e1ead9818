"""Puts encryption between the log and its callers: the log sees only encrypted blocks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from kvtier.errors import StoreFault
from kvtier.plugin_api.backend import LoadBlock, Loaded, Outcome, StoreBlock
from kvtier.plugin_api.threads import DaemonThreads
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


class EncryptedLog:
    """Encrypts stored blocks and decrypts loaded ones, in threads of its own."""

    def __init__(self, cipher: BlockCipher, name: str) -> None:
        self.keyring = cipher.keyring
        self._cipher = cipher
        self._threads = DaemonThreads(ENCRYPTION_THREADS, f"{name}-encrypt")
        self._is_stopped = False

    async def store(self, log: BlockLog, blocks: Sequence[StoreBlock]) -> list[Outcome]:
        """Encrypt the blocks that are not stored yet, and append them."""
        fresh = [block for block in blocks if not log.has(block.key)]
        if not fresh:
            return [Outcome.DONE] * len(blocks)
        memory = self._cipher.borrow(len(fresh))
        plain = [(block.key, block.buffer, block.digest) for block in fresh]
        tags = await self._run(partial(self._cipher.encrypt, plain, memory))
        encrypted = [
            StoreBlock(block.key, view, digest)
            for block, view, (_, digest) in zip(
                fresh, self._cipher.views(memory, len(fresh)), tags, strict=True
            )
        ]
        outcomes = await log.store(encrypted, [tag for tag, _ in tags])
        self._cipher.give_back(memory)
        outcome_of = dict(zip((block.key for block in fresh), outcomes, strict=True))
        return [outcome_of.get(block.key, Outcome.DONE) for block in blocks]

    async def load(self, log: BlockLog, blocks: Sequence[LoadBlock]) -> list[Loaded]:
        """Read the encrypted blocks, and decrypt each into its buffer."""
        memory = self._cipher.borrow(len(blocks))
        views = self._cipher.views(memory, len(blocks))
        encryption: dict[bytes, Encryption] = {}
        answers = await log.load(
            [LoadBlock(block.key, view) for block, view in zip(blocks, views, strict=True)],
            encryption,
        )
        done = [place for place, each in enumerate(answers) if each.outcome is Outcome.DONE]
        places = []
        for place in done:
            key = blocks[place].key
            tag, key_id = encryption[key]
            places.append((place, EncryptedBlock(key, key_id, tag, answers[place].digest or b"")))
        buffers = [blocks[place].buffer for place in done]
        decrypted = await self._run(partial(self._cipher.decrypt, memory, places, buffers))
        for place, (outcome, digest) in zip(done, decrypted, strict=True):
            answers[place] = Loaded(outcome, digest or None)
        self._cipher.give_back(memory)
        return answers

    async def _run(self, call: Callable[[], T]) -> T:
        if self._is_stopped:
            # Nothing would ever run it.
            raise StoreFault("the tier is closed")
        return await self._threads.run(call)

    def busy(self) -> int:
        """Count the calls that may still touch a block's buffer. Any thread."""
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
        cipher = BlockCipher(keyring, namespace_digest(context), context.block_bytes)
    except ImportError:
        raise refuse_missing_package(reader, ENCRYPTION_KEY) from None
    return EncryptedLog(cipher, context.tier_name)
