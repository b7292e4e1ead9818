"""Signs blocks: a MAC of 16 bytes, by AES-256-GCM with nothing to encrypt (GMAC).

Every signature has a key of its own, derived (keyed BLAKE2b) from the engine's
key, 16 random bytes (the salt) and all data to be covered besides the block's
bytes: so no nonce can repeat, however long a key is in use, and a signature
fails under another cache key, namespace or length. This is the fastest MAC of
``cryptography`` and ``hashlib``, see Protect shared storage in the docs.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import TYPE_CHECKING, Final

from kvtier_backends.encryption.cipher import NONCE, SALT_BYTES
from kvtier_backends.encryption.keys import KEY_BYTES

if TYPE_CHECKING:
    from kvtier_backends.encryption.keys import Keyring


class BlockSigner:
    """Signs blocks, and verifies signatures. Any thread may call any method.

    The bytes are hashed without the GIL.
    """

    def __init__(self, keyring: Keyring) -> None:
        """Raises ``ImportError`` without the library."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - an extra

        self._aead = AESGCM
        self.current_id: Final = keyring.current_id
        # Not the keys themselves: if one also encrypts elsewhere, the two uses share nothing.
        self._masters = {key_id: _master(key) for key_id, key in keyring.by_id.items()}

    def sign(self, covered: bytes, block: memoryview) -> bytes:
        """Return salt and MAC, ``TAG_BYTES`` in all, under the key that signs.

        ``covered``: all data that the signature covers besides the block. It must differ
        for different things.
        """
        salt = os.urandom(SALT_BYTES)
        return salt + self._mac(self._masters[self.current_id], salt, covered, block)

    def is_signed(self, key_id: bytes, covered: bytes, block: memoryview, tag: bytes) -> bool:
        """Return whether the key of this id signed exactly this; False for an unknown key."""
        master = self._masters.get(key_id)
        if master is None:
            return False
        salt, mac = tag[:SALT_BYTES], tag[SALT_BYTES:]
        return hmac.compare_digest(self._mac(master, salt, covered, block), mac)

    def _mac(self, master: bytes, salt: bytes, covered: bytes, block: memoryview) -> bytes:
        key = hashlib.blake2b(salt + covered, key=master, digest_size=KEY_BYTES).digest()
        return self._aead(key).encrypt(NONCE, b"", block)


def _master(key: bytes) -> bytes:
    return hashlib.blake2b(key=key, digest_size=KEY_BYTES, person=b"kvtier block mac").digest()
