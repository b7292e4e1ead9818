"""Records that cannot be made (signed), or not even read (encrypted), without a key.

A signature covers the namespace, all of the trailer before it, the
block's key and its bytes. So does the tag of an encrypted block; the digest is
masked there. Whether a block is compressed follows from the number of its bytes.

# Invariant: ``decode_untrusted`` gives DONE only for a record that a holder of one of the keys
#            made, of this block's key in this namespace. Copying an old one back
#            restores the block that belongs there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Final

from kvtier_backends.encryption.cipher import BlockCipher, EncryptedBlock
from kvtier_backends.encryption.signer import BlockSigner
from kvtier_backends.shared.namespaces import namespace_digest
from kvtier_backends.shared.plain_records import Record, Records
from kvtier_backends.shared.record_trailer import Form, Trailer, encode_head, encode_trailer

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import BackendContext
    from kvtier_backends.encryption.keys import Keyring
    from kvtier_backends.shared.compression import BlockCompressor

PROTECTION: Final = "protection"  #: the name of the fact in which such namespaces differ
_DOMAIN: Final = b"kvtier record\n"
"""Precedes the covered bytes: data that the same key protects elsewhere is not a record."""


class SignedRecords(Records):
    """Blocks that anyone can read, and only a holder of a key can make."""

    form: ClassVar = Form.SIGNED

    def __init__(
        self,
        context: BackendContext,
        keyring: Keyring,
        compressor: BlockCompressor | None = None,
    ) -> None:
        """Raises ``ImportError`` without the library."""
        super().__init__(_protected(context, "signed"), compressor)
        self._signer = BlockSigner(keyring)
        self._namespace = _DOMAIN + namespace_digest(self.context)

    def _protect(self, key: bytes, payload: memoryview, trailer: Trailer) -> Record:
        tag = self._signer.sign(self._covered(key, trailer), payload)
        signed = trailer._replace(key_id=self._signer.current_id, tag=tag)
        return Record(payload, encode_trailer(key, self._block_bytes, signed))

    def _open_untrusted(
        self, key: bytes, payload: memoryview, trailer: Trailer, buffer: memoryview
    ) -> bytes | None:
        # Verify the copy: others may write to the payload's memory.
        digest = super()._open_untrusted(key, payload, trailer, buffer)
        covered = self._covered(key, trailer)
        is_signed = self._signer.is_signed(trailer.key_id, covered, buffer, trailer.tag)
        return digest if is_signed else None

    def _covered(self, key: bytes, trailer: Trailer) -> bytes:
        return self._namespace + encode_head(key, self._block_bytes, trailer)


class EncryptedRecords(Records):
    """Blocks that only a holder of a key can read, or make.

    The length of a compressed block is visible to anyone, in whole pages.
    """

    form: ClassVar = Form.ENCRYPTED

    def __init__(
        self,
        context: BackendContext,
        keyring: Keyring,
        compressor: BlockCompressor | None = None,
    ) -> None:
        """Raises ``ImportError`` without the library."""
        super().__init__(_protected(context, "encrypted"), compressor)
        namespace = _DOMAIN + namespace_digest(self.context)
        self._cipher = BlockCipher(keyring, namespace, context.block_bytes, binds_digest=True)

    @property
    def are_plain(self) -> bool:
        """Always False: a payload is encrypted."""
        return False

    def _protect(self, key: bytes, payload: memoryview, trailer: Trailer) -> Record:
        memory = self._cipher.borrow()
        tag, digest = self._cipher.encrypt(key, payload, trailer.digest, memory)
        key_id = self._cipher.keyring.current_id
        encrypted = trailer._replace(digest=digest, key_id=key_id, tag=tag)
        kept = memory[: payload.nbytes]
        return Record(kept, encode_trailer(key, self._block_bytes, encrypted))

    def room_for(self, buffer: memoryview) -> memoryview:
        """Return memory for the encrypted block."""
        return self._cipher.borrow()[: buffer.nbytes]

    def give_back(self, payload: memoryview) -> None:
        """Keep the memory for the next payload."""
        self._cipher.give_back(payload)

    def _open_untrusted(
        self, key: bytes, payload: memoryview, trailer: Trailer, buffer: memoryview
    ) -> bytes | None:
        if trailer.key_id not in self._cipher.keyring.by_id:
            return None
        encrypted = EncryptedBlock(key, trailer.key_id, trailer.tag, trailer.digest)
        return self._cipher.decrypt_apart(encrypted, payload, buffer)


def _protected(context: BackendContext, how: str) -> BackendContext:
    """Return a context of another namespace, for blocks that are protected in this way."""
    facts = {**context.namespace.facts, PROTECTION: how}
    return replace(context, namespace=replace(context.namespace, facts=facts))
