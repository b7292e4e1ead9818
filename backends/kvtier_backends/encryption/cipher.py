"""Encrypts blocks with AES-256-GCM, by the library ``cryptography``.

Every block has a key of its own, derived (keyed BLAKE2b) from the engine's key
and 16 random bytes, the block's salt: so no nonce can repeat, however long
a key is in use. The block's cache key and namespace are associated data: a
block stored under another key fails its tag. Salt and tag are stored beside the block.
So is the digest, masked with a pad that is derived too: unmasked, it would reveal
whether a guess at the block is right.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.plugin_api.backend import DIGEST_BYTES, Outcome
from kvtier_backends.encryption.keys import KEY_BYTES
from kvtier_backends.memory_pool import MemoryPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier_backends.encryption.keys import Keyring

TAG_BYTES: Final = 32  #: salt and tag
SALT_BYTES: Final = 16
_GCM_TAG_BYTES: Final = 16
NONCE: Final = bytes(12)  # each block has its own key, which is used once

assert SALT_BYTES + _GCM_TAG_BYTES == TAG_BYTES


class EncryptedBlock(NamedTuple):
    """All that is needed to decrypt one block, besides its bytes."""

    key: bytes
    key_id: bytes
    tag: bytes  #: salt and tag
    digest: bytes  #: masked


class BlockCipher:
    """Encrypts and decrypts blocks of one namespace. Any thread may call any method."""

    def __init__(
        self, keyring: Keyring, namespace: bytes, block_bytes: int, *, binds_digest: bool = False
    ) -> None:
        """``binds_digest``: the digest is associated data too. ``disk`` has it elsewhere.

        Raises ``ImportError`` without the library.
        """
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.ciphers import Cipher  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.ciphers.algorithms import AES  # noqa: PLC0415
        from cryptography.hazmat.primitives.ciphers.modes import GCM  # noqa: PLC0415

        self.keyring = keyring
        self._aead = AESGCM
        self._cipher, self._aes, self._gcm = Cipher, AES, GCM
        self._binds_digest = binds_digest
        self._invalid = InvalidTag
        self._namespace = namespace
        self._block_bytes = block_bytes
        self._pool = MemoryPool(block_bytes)
        self._step = self._pool.step

    def borrow(self, blocks: int) -> memoryview:
        """Return page-aligned memory for this many blocks and their tags, or more."""
        return self._pool.borrow(blocks)

    def give_back(self, memory: memoryview) -> None:
        """Keep borrowed memory for the next ``borrow``. Nothing may read or write it any more."""
        self._pool.give_back(memory)

    def views(self, memory: memoryview, blocks: int) -> list[memoryview]:
        """Return the first blocks in borrowed memory, without their tags."""
        starts = range(0, blocks * self._step, self._step)
        return [memory[at : at + self._block_bytes] for at in starts]

    def encrypt(
        self, blocks: Sequence[tuple[bytes, memoryview, bytes]], into: memoryview
    ) -> list[tuple[bytes, bytes]]:
        """Encrypt each (key, block, digest); return each one's tag and masked digest.

        A block may be shorter than others.
        """
        master = self.keyring.by_id[self.keyring.current_id]
        encrypted = []
        for number, (key, buffer, digest) in enumerate(blocks):
            salt = os.urandom(SALT_BYTES)
            block_key, pad = _derive(master, salt)
            at = number * self._step
            end = at + buffer.nbytes
            target = into[at : end + _GCM_TAG_BYTES]
            associated = self._associated(key, digest)
            self._aead(block_key).encrypt_into(NONCE, buffer, associated, target)
            encrypted.append((salt + bytes(into[end : end + _GCM_TAG_BYTES]), _xor(digest, pad)))
        return encrypted

    def decrypt(
        self,
        memory: memoryview,
        places: Sequence[tuple[int, EncryptedBlock]],
        buffers: Sequence[memoryview],
    ) -> list[tuple[Outcome, bytes]]:
        """Decrypt the blocks at some places in memory; return outcomes and digests."""
        decrypted = []
        for (number, encrypted), buffer in zip(places, buffers, strict=True):
            block_key, pad = _derive(
                self.keyring.by_id[encrypted.key_id], encrypted.tag[:SALT_BYTES]
            )
            at = number * self._step
            end = at + self._block_bytes
            memory[end : end + _GCM_TAG_BYTES] = encrypted.tag[SALT_BYTES:]
            source = memory[at : end + _GCM_TAG_BYTES]
            digest = _xor(encrypted.digest, pad)
            associated = self._associated(encrypted.key, digest)
            try:
                self._aead(block_key).decrypt_into(NONCE, source, associated, buffer)
            except self._invalid:
                decrypted.append((Outcome.DAMAGED, b""))
            else:
                decrypted.append((Outcome.DONE, digest))
        return decrypted

    def decrypt_apart(
        self, encrypted: EncryptedBlock, payload: memoryview, buffer: memoryview
    ) -> bytes | None:
        """Decrypt a block whose tag is stored apart from it; return its digest, None if unsound.

        ``payload`` and ``buffer`` are as long as the encrypted bytes. The key's id must be known.
        """
        salt, tag = encrypted.tag[:SALT_BYTES], encrypted.tag[SALT_BYTES:]
        block_key, pad = _derive(self.keyring.by_id[encrypted.key_id], salt)
        digest = _xor(encrypted.digest, pad)
        decryptor = self._cipher(self._aes(block_key), self._gcm(NONCE, tag)).decryptor()
        decryptor.authenticate_additional_data(self._associated(encrypted.key, digest))
        decryptor.update_into(payload, buffer)
        try:
            decryptor.finalize()
        except self._invalid:
            return None
        return digest

    def _associated(self, key: bytes, digest: bytes) -> bytes:
        return self._namespace + key + (digest if self._binds_digest else b"")


def _derive(master: bytes, salt: bytes) -> tuple[bytes, bytes]:
    """Return a block's own key, and the pad that masks its digest."""
    size = KEY_BYTES + DIGEST_BYTES
    derived = hashlib.blake2b(salt, key=master, digest_size=size, person=b"kvtier block").digest()
    return derived[:KEY_BYTES], derived[KEY_BYTES:]


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))
