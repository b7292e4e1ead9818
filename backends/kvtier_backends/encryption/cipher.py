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

from kvtier.plugin_api.backend import DIGEST_BYTES
from kvtier_backends.encryption.keys import KEY_BYTES
from kvtier_backends.memory_pool import KEPT_BYTES_MAX, MemoryPool

if TYPE_CHECKING:
    from kvtier_backends.encryption.keys import Keyring

TAG_BYTES: Final = 32  #: salt and tag
SALT_BYTES: Final = 16
_GCM_TAG_BYTES: Final = 16
NONCE: Final = bytes(12)  # each block has its own key, which is used once

assert SALT_BYTES + _GCM_TAG_BYTES == TAG_BYTES


class EncryptedBlock(NamedTuple):
    """Data needed to decrypt one block, besides its bytes."""

    key: bytes
    key_id: bytes
    tag: bytes  #: salt and tag
    digest: bytes  #: masked


class BlockCipher:
    """Encrypts and decrypts blocks of one namespace. Any thread may call any method."""

    def __init__(
        self,
        keyring: Keyring,
        namespace: bytes,
        block_bytes: int,
        *,
        binds_digest: bool = False,
        kept_bytes_max: int = KEPT_BYTES_MAX,
    ) -> None:
        """``binds_digest``: the digest is associated data too. ``disk`` has it elsewhere.

        ``kept_bytes_max``: the most memory to keep while no block is in transit.

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
        self._pool = MemoryPool(block_bytes, kept_bytes_max)

    def borrow(self) -> memoryview:
        """Return page-aligned memory for one encrypted block and its tag."""
        return self._pool.borrow()

    def give_back(self, memory: memoryview) -> None:
        """Keep borrowed memory for the next ``borrow``. Nothing may read or write it any more."""
        self._pool.give_back(memory)

    @property
    def borrowed_bytes(self) -> int:
        """Size of borrowed memory."""
        return self._pool.step

    def encrypt(
        self, key: bytes, buffer: memoryview, digest: bytes, into: memoryview
    ) -> tuple[bytes, bytes]:
        """Encrypt a block into borrowed memory; return its tag and its masked digest.

        It may be shorter than others.
        """
        salt = os.urandom(SALT_BYTES)
        block_key, pad = _derive(self.keyring.by_id[self.keyring.current_id], salt)
        end = buffer.nbytes
        target = into[: end + _GCM_TAG_BYTES]
        self._aead(block_key).encrypt_into(NONCE, buffer, self._associated(key, digest), target)
        return salt + bytes(target[end:]), _xor(digest, pad)

    def decrypt(
        self, memory: memoryview, encrypted: EncryptedBlock, buffer: memoryview
    ) -> bytes | None:
        """Decrypt the block in borrowed memory; return its digest, None if it is unsound."""
        salt, tag = encrypted.tag[:SALT_BYTES], encrypted.tag[SALT_BYTES:]
        block_key, pad = _derive(self.keyring.by_id[encrypted.key_id], salt)
        end = buffer.nbytes
        memory[end : end + _GCM_TAG_BYTES] = tag
        source = memory[: end + _GCM_TAG_BYTES]
        digest = _xor(encrypted.digest, pad)
        associated = self._associated(encrypted.key, digest)
        try:
            self._aead(block_key).decrypt_into(NONCE, source, associated, buffer)
        except self._invalid:
            return None
        return digest

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
