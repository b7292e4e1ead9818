"""Defines the file of each block: in kvtier's own folders, or exactly those of vLLM's own tier.

kvtier:  ``<root>/<model>_<digest of the facts>/<hhh>/<hh>/<key>.kv``
vLLM:    ``<root>/<model>_<digest of its fields>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin``

In both, ``<root>/<model>_<digest>/config.json`` spells out the facts behind the
digest, so that a clash or a mix-up is detected and not served.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError, Misuse
from kvtier_backends.posix import shared_mode
from kvtier_backends.shared.namespaces import as_json, describe, digest_of, namespace_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.backend import BackendContext

FORMAT: Final = "kvtier-fs"
FORMAT_VERSION: Final = 1
KVTIER_SUFFIX: Final = ".kv"
VLLM_SUFFIX: Final = ".bin"
_GROUP_BYTES: Final = 4
_KEY_IN_NAME_BYTES_MAX: Final = 64  # file names have at most 255 characters, with temporary suffix


class Layout(ABC):
    """The folder and file names of one namespace. Touches no file."""

    folder_mode: int
    file_mode: int

    def __init__(self, root: str, base: str, blocks: str, config: Mapping[str, Any]) -> None:
        self.base_name = base  #: the folder of ``config.json``, in the root
        self.blocks_name = blocks  #: the folder under which the blocks lie, in the root
        self.base = f"{root}/{base}"
        self.blocks = f"{root}/{blocks}"
        self.config = config  #: the contents of ``config.json``, as JSON values

    def share_as(self, root_mode: int) -> None:
        """Give the root's group the same rights on new files and folders as in the root."""
        self.folder_mode = shared_mode(self.folder_mode, root_mode)
        self.file_mode = shared_mode(self.file_mode, root_mode)

    @property
    def config_path(self) -> str:
        """The readable description of the namespace."""
        return f"{self.base}/config.json"

    def path(self, key: bytes) -> str:
        """Return the file of ``key``. Raises ``Misuse`` for a key that cannot be stored."""
        return f"{self.blocks}/{self.name(key)}"

    @abstractmethod
    def name(self, key: bytes) -> str:
        """Return the file of ``key`` below ``blocks``: two folders and its own name.

        Raises ``Misuse`` for a key that cannot be stored.
        """

    @abstractmethod
    def key_of_untrusted(self, name: str) -> bytes | None:
        """Return the key of a file named as by ``name``; None if it can't be derived."""


class KvtierLayout(Layout):
    """kvtier's own folders, for this user alone, or for those who may use the root."""

    folder_mode = 0o700
    file_mode = 0o600

    def __init__(self, root: str, context: BackendContext) -> None:
        base = namespace_name(context)
        super().__init__(root, base, base, describe(FORMAT, FORMAT_VERSION, context))

    def name(self, key: bytes) -> str:
        """Return the file of ``key``; a long key is filed under its hash."""
        if len(key) <= _KEY_IN_NAME_BYTES_MAX:
            name = key.hex()
        else:
            # The trailer holds the whole key, so the name need not differ from a short key's.
            name = hashlib.blake2b(key, digest_size=_KEY_IN_NAME_BYTES_MAX).hexdigest()
        fan = name.ljust(5, "_")
        return f"{fan[:3]}/{fan[3:5]}/{name}.kv"

    def key_of_untrusted(self, name: str) -> bytes | None:
        """Return the key of a file; None if it may be filed under the key's hash."""
        return key_of_file_untrusted(name) if name.endswith(KVTIER_SUFFIX) else None


class VllmLayout(Layout):
    """The folders of vLLM's own ``fs`` tier, so that both can use one cache."""

    folder_mode = 0o755
    file_mode = 0o644

    def __init__(self, root: str, context: BackendContext) -> None:
        namespace = context.namespace
        if namespace.vllm_fields is None:
            refusal = namespace.vllm_refusal or (
                "needs vLLM's own folder fields, and this engine gave none. Set layout to 'kvtier'"
            )
            raise ConfigError(f"secondary tier {context.tier_name}: layout='vllm' {refusal}.")
        fields = as_json(namespace.vllm_fields)
        model = str(fields["model_name"]).replace("/", "_")
        base = f"{model}_{digest_of(fields)}"
        super().__init__(root, base, f"{base}_r{namespace.vllm_rank}", fields)

    def name(self, key: bytes) -> str:
        """Return vLLM's file of a block hash followed by a 4-byte big-endian group index."""
        if len(key) <= _GROUP_BYTES:
            raise Misuse(
                f"layout 'vllm' takes keys of more than {_GROUP_BYTES} bytes, not {len(key)}: "
                "a block hash and a group index. Use layout 'kvtier' for other keys."
            )
        name = key[:-_GROUP_BYTES].hex()
        group = int.from_bytes(key[-_GROUP_BYTES:], "big")
        return f"{name[:3]}/{name[3:5]}_g{group}/{name}.bin"

    def key_of_untrusted(self, name: str) -> bytes | None:
        """Return the key of a file."""
        return key_of_file_untrusted(name) if name.endswith(VLLM_SUFFIX) else None


def key_of_file_untrusted(name: str) -> bytes | None:
    """Return the key of a file of either layout, named below its namespace's folder.

    None if the key can't be derived: the name is a long key's hash, or of neither layout.
    """
    folder, _, last = name.rpartition("/")
    if last.endswith(KVTIER_SUFFIX):
        key = _bytes_of_hex(last.removesuffix(KVTIER_SUFFIX))
        return key if key and len(key) < _KEY_IN_NAME_BYTES_MAX else None
    group = folder.rpartition("_g")[2]
    block_hash = _bytes_of_hex(last.removesuffix(VLLM_SUFFIX))
    if not block_hash or not group.isdecimal() or int(group) >> 8 * _GROUP_BYTES:
        return None
    return block_hash + int(group).to_bytes(_GROUP_BYTES, "big")


def _bytes_of_hex(text: str) -> bytes | None:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return None


def make_layout(name: str, root: str, context: BackendContext) -> Layout:
    """Build the layout called ``name``, ``kvtier`` or ``vllm``, below ``root``."""
    return VllmLayout(root, context) if name == "vllm" else KvtierLayout(root, context)
