"""Encrypts blocks with AES-256-GCM, by the library ``cryptography``.

Every block has a key of its own, derived (keyed BLAKE2b) from the engine's key
and 16 random bytes, the block's salt: so no nonce can come twice, however long
a key is in use. The block's cache key and namespace are associated data: a
block that lies under another key fails its tag. Salt and tag lie in the table.
So does the digest, masked with a pad that is derived too: it would tell
whether a guess at the block is right.

A keyring has one key that writes and others that still read: rotation is a
new first line, and old regions go on being served until they are overwritten.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import DIGEST_BYTES, Outcome
from kvtier_backends.disk.format import ID_BYTES, PAGE_BYTES, TAG_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY_BYTES: Final = 32
KEYS_MAX: Final = 16
_SALT_BYTES: Final = 16
_GCM_TAG_BYTES: Final = 16
_NONCE: Final = bytes(12)  # each block has its own key, which is used once
_POOL_MAX: Final = 16

assert _SALT_BYTES + _GCM_TAG_BYTES == TAG_BYTES


class Keyring:
    """Encryption keys by id. The first one writes."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self.by_id = {_key_id(key): key for key in keys}
        self.current_id = _key_id(keys[0])


class EncryptedBlock(NamedTuple):
    """What is needed to decrypt one block, besides its bytes."""

    key: bytes
    key_id: bytes
    tag: bytes  #: salt and tag
    digest: bytes  #: masked


def parse_keys_untrusted(text: str) -> Keyring:
    """Read one key a line, in hex; empty lines and ``#`` lines don't count.

    Raises ``ConfigError`` and nothing else, and never says what it read.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    keys = []
    for number, line in enumerate(lines, start=1):
        try:
            key = bytes.fromhex(line)
        except ValueError:
            key = b""
        if len(key) != KEY_BYTES:
            raise ConfigError(f"key {number} is not {2 * KEY_BYTES} hex digits")
        keys.append(key)
    if not 0 < len(keys) <= KEYS_MAX:
        raise ConfigError(f"there must be 1 to {KEYS_MAX} keys, not {len(keys)}")
    return Keyring(keys)


class BlockCipher:
    """Encrypts and decrypts blocks of one namespace. Any thread may call any method."""

    def __init__(self, keyring: Keyring, namespace: bytes, block_bytes: int) -> None:
        """Raises ``ImportError`` without the library."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - an extra

        self.keyring = keyring
        self._aead = AESGCM
        self._invalid = InvalidTag
        self._namespace = namespace
        self._block_bytes = block_bytes
        # A page between any two blocks: room for a tag, and the next one is aligned again.
        self._step = (block_bytes // PAGE_BYTES + 2) * PAGE_BYTES
        self._pool: list[memoryview] = []

    def borrow(self, blocks: int) -> memoryview:
        """Return page-aligned memory for so many blocks and their tags, or more."""
        # To touch new memory takes as long as to encrypt it: few sizes, so that it is used again.
        size = self._step << max(0, blocks - 1).bit_length()
        for place, memory in enumerate(self._pool):
            if len(memory) == size:
                return self._pool.pop(place)
        return memoryview(mmap.mmap(-1, size))

    def give_back(self, memory: memoryview) -> None:
        """Keep borrowed memory for the next ``borrow``. Nothing reads or writes it any more."""
        self._pool = [memory, *self._pool[: _POOL_MAX - 1]]

    def views(self, memory: memoryview, blocks: int) -> list[memoryview]:
        """Return the first blocks in borrowed memory, without their tags."""
        starts = range(0, blocks * self._step, self._step)
        return [memory[at : at + self._block_bytes] for at in starts]

    def encrypt(
        self, blocks: Sequence[tuple[bytes, memoryview, bytes]], into: memoryview
    ) -> list[tuple[bytes, bytes]]:
        """Encrypt (key, block, digest) one by one; returns each one's tag and masked digest."""
        master = self.keyring.by_id[self.keyring.current_id]
        encrypted = []
        for number, (key, buffer, digest) in enumerate(blocks):
            salt = os.urandom(_SALT_BYTES)
            block_key, pad = _derive(master, salt)
            at = number * self._step
            end = at + self._block_bytes
            target = into[at : end + _GCM_TAG_BYTES]
            self._aead(block_key).encrypt_into(_NONCE, buffer, self._namespace + key, target)
            encrypted.append((salt + bytes(into[end : end + _GCM_TAG_BYTES]), _xor(digest, pad)))
        return encrypted

    def decrypt(
        self,
        memory: memoryview,
        places: Sequence[tuple[int, EncryptedBlock]],
        buffers: Sequence[memoryview],
    ) -> list[tuple[Outcome, bytes]]:
        """Decrypt the blocks at some places in memory; returns outcomes and digests."""
        decrypted = []
        for (number, encrypted), buffer in zip(places, buffers, strict=True):
            block_key, pad = _derive(
                self.keyring.by_id[encrypted.key_id], encrypted.tag[:_SALT_BYTES]
            )
            at = number * self._step
            end = at + self._block_bytes
            memory[end : end + _GCM_TAG_BYTES] = encrypted.tag[_SALT_BYTES:]
            source = memory[at : end + _GCM_TAG_BYTES]
            associated = self._namespace + encrypted.key
            try:
                self._aead(block_key).decrypt_into(_NONCE, source, associated, buffer)
            except self._invalid:
                decrypted.append((Outcome.DAMAGED, b""))
            else:
                decrypted.append((Outcome.DONE, _xor(encrypted.digest, pad)))
        return decrypted


def _derive(master: bytes, salt: bytes) -> tuple[bytes, bytes]:
    """Return a block's own key, and the pad that masks its digest."""
    size = KEY_BYTES + DIGEST_BYTES
    derived = hashlib.blake2b(salt, key=master, digest_size=size, person=b"kvtier block").digest()
    return derived[:KEY_BYTES], derived[KEY_BYTES:]


def _xor(one: bytes, other: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, other, strict=True))


def _key_id(key: bytes) -> bytes:
    return hashlib.blake2b(key=key, digest_size=ID_BYTES, person=b"kvtier key id").digest()
