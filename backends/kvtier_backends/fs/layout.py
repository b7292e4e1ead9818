"""Where each block lies: kvtier's own folders, or exactly those of vLLM 0.32.

kvtier:  ``<root>/<model>_<digest of the facts>/<hhh>/<hh>/<key>.kv``
vLLM:    ``<root>/<model>_<digest of its fields>_r<rank>/<hhh>/<hh>_g<group>/<hash>.bin``

In both, ``<root>/<model>_<digest>/config.json`` says in plain words what the
digest stands for, so that a clash or a mix-up is seen and not served.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kvtier.errors import ConfigError, Misuse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.backend import BackendContext

FORMAT_VERSION: Final = 1
_DIGEST_HEX_DIGITS: Final = 12
_GROUP_BYTES: Final = 4
_NAME_CHARACTERS_MAX: Final = 64
_KEY_IN_NAME_BYTES_MAX: Final = 64  # file names end at 255 characters, temporary suffix included


class Layout(ABC):
    """Names of the folders and files of one namespace. Touches no file."""

    folder_mode: ClassVar[int]
    file_mode: ClassVar[int]

    def __init__(self, root: str, base: str, blocks: str, config: Mapping[str, Any]) -> None:
        self.base_name = base  #: the folder of ``config.json``, in the root
        self.blocks_name = blocks  #: the folder under which the blocks lie, in the root
        self.base = f"{root}/{base}"
        self.blocks = f"{root}/{blocks}"
        self.config = config  #: what ``config.json`` holds, as JSON values

    @property
    def config_path(self) -> str:
        """The readable description of the namespace."""
        return f"{self.base}/config.json"

    def path(self, key: bytes) -> str:
        """Return the file of ``key``. Raises ``Misuse`` for a key that has no place."""
        return f"{self.blocks}/{self.name(key)}"

    @abstractmethod
    def name(self, key: bytes) -> str:
        """Return the file of ``key`` below ``blocks``: two folders and its own name.

        Raises ``Misuse`` for a key that has no place.
        """


class KvtierLayout(Layout):
    """kvtier's own folders, for this user alone."""

    folder_mode = 0o700
    file_mode = 0o600

    def __init__(self, root: str, context: BackendContext) -> None:
        facts = _as_json(context.namespace.facts)
        name = str(facts.get("model_name") or facts.get("model") or "model")
        base = f"{_safe_name(name)}_{_digest(facts)}"
        config = {
            "format": "kvtier-fs",
            "format_version": FORMAT_VERSION,
            "block_bytes": context.block_bytes,
            "facts": facts,
        }
        super().__init__(root, base, base, config)

    def name(self, key: bytes) -> str:
        """Return the file of ``key``; a long key is filed under its hash."""
        if len(key) <= _KEY_IN_NAME_BYTES_MAX:
            name = key.hex()
        else:
            # The trailer holds the whole key, so this need not be told apart from a short one.
            name = hashlib.blake2b(key, digest_size=_KEY_IN_NAME_BYTES_MAX).hexdigest()
        fan = name.ljust(5, "_")
        return f"{fan[:3]}/{fan[3:5]}/{name}.kv"


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
        fields = _as_json(namespace.vllm_fields)
        model = str(fields["model_name"]).replace("/", "_")
        base = f"{model}_{_digest(fields)}"
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


def make_layout(name: str, root: str, context: BackendContext) -> Layout:
    """Build the layout called ``name``, ``kvtier`` or ``vllm``, below ``root``."""
    return VllmLayout(root, context) if name == "vllm" else KvtierLayout(root, context)


def _as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts as they come back from a file (tuples become lists)."""
    values: dict[str, Any] = json.loads(json.dumps(dict(facts), allow_nan=False))
    return values


def _digest(facts: Mapping[str, Any]) -> str:
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:_DIGEST_HEX_DIGITS]


def _safe_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")[:_NAME_CHARACTERS_MAX] or "model"
