"""Identifies LoRA adapters by content: one replaced under the same name and path is a new adapter.

vLLM's block hashes contain an adapter's name and path. ``know_adapters`` replaces the path with a
digest of its files. It does so in the scheduler's process, where requests are hashed, so it applies
alike to vLLM's own prefix cache, to host memory and to each tier, and to two hosts that have the
same adapter. The files are read once for each loaded adapter: when a client has the engine load it,
or else with its first request, by the thread that takes in requests.

A worker keeps using a loaded adapter even if its files change, and reads them again after it has
evicted the adapter for another. So if the files have changed since the load, or can't be read, the
weights in use are unknown: such a request gets unique hashes, shared with no other request.
A request that runs while an adapter is reloaded in place is computed with both: it is not stored.
"""

from __future__ import annotations

import hashlib
import threading
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4
from weakref import WeakValueDictionary

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.engine.core import EngineCore

from kvtier.plugin_api.log import log
from kvtier.vllm.workarounds.hooking import once_a_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

_NAMES: Final = ("adapter_config.json", "adapter_model.*", "new_embeddings.*")
_TAG: Final = "lora"
_DIGEST_HEX_DIGITS: Final = 32

_State = tuple[tuple[str, int, int, int], ...]


class _Adapter(NamedTuple):
    path: str
    state: _State  #: of its files, when it was loaded
    digest: str | None  #: None: unknown


class Adapters:
    """The adapters that one process's engines have loaded, by vLLM's number. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[int, _Adapter] = {}
        self._live: WeakValueDictionary[str, Request] = WeakValueDictionary()
        self.mixed: set[str] = set()  #: requests that ran while their adapter was replaced
        self._said: set[tuple[str, _State]] = set()

    def loaded(self, request: LoRARequest, before: _State) -> None:
        """Record that an adapter has been loaded. Reads its files.

        ``before``: their state before the load; empty if the load downloaded them from a hub.
        """
        with self._lock:
            known = self._loaded.get(request.lora_int_id)
            if known is not None and not request.load_inplace:
                return  # the worker keeps the adapter it has
            now = _look_at(request.lora_path)
            is_sure = before in ((), now.state)
            # Not with the state of now: the files have changed since the load began.
            self._set(request.lora_int_id, now if is_sure else _Adapter(now.path, before, None))

    def forget(self) -> None:
        """Forget all adapters: a new engine loads them again."""
        with self._lock:
            self._loaded.clear()

    def remove(self, number: int) -> None:
        """Forget an adapter: its number may be reused."""
        with self._lock:
            self._loaded.pop(number, None)

    def _set(self, number: int, adapter: _Adapter) -> _Adapter:
        """Record an adapter. Requests running with the one it replaces are computed with both."""
        known = self._loaded.get(number)
        self._loaded[number] = adapter
        if known is not None and (adapter.digest is None or adapter.digest != known.digest):
            for name, request in self._live.items():
                if request.lora_request.lora_int_id == number:
                    self.mixed.add(name)
        return adapter

    def digest_for(self, request: Request) -> str:
        """Return the digest for a request's adapter; it stays the same while the request runs."""
        digest: str | None = getattr(request, "kvtier_adapter", None)
        if digest is None:
            digest = self.digest(request.lora_request)
            request.kvtier_adapter = digest
            with self._lock:
                self._live[request.request_id] = request
        return digest

    def digest(self, request: LoRARequest) -> str:
        """Return a digest of an adapter's content, or a unique value if the content is unknown."""
        with self._lock:
            known = self._loaded.get(request.lora_int_id)
            now = _state_of(request.lora_path)
            if known is None or (now != known.state and (request.load_inplace or not known.state)):
                known = self._set(request.lora_int_id, _look_at(request.lora_path))
            is_same = (known.path, known.state) == (request.lora_path, now)
            if known.digest is not None and is_same:
                return known.digest
            self._say_once(request, now, is_same=is_same)
            return f"unknown-{uuid4().hex}"

    def _say_once(self, request: LoRARequest, now: _State, *, is_same: bool) -> None:
        if (request.lora_path, now) not in self._said:
            self._said.add((request.lora_path, now))
            log.warning(
                "the contents of this LoRA adapter cannot be identified: its requests share no "
                "blocks. Load it in place (load_inplace), or from another path, after its files "
                "have changed"
                if not is_same
                else "this LoRA adapter's files can't be read: its requests share no blocks. Load "
                "it from a folder of this host",
                adapter=request.lora_name,
                path=request.lora_path,
            )


ADAPTERS: Final = Adapters()
"""The adapters of this process."""


def know_adapters() -> None:
    """Make block hashes distinguish adapters by content, for an engine that starts in this process.

    The new engine has loaded none yet, even if an earlier engine had loaded some here.
    """
    ADAPTERS.forget()
    _hook_adapters()


@once_a_process
def _hook_adapters() -> None:
    real = kv_cache_utils.generate_block_hash_extra_keys  # perhaps wrapped already: media.py
    kv_cache_utils.generate_block_hash_extra_keys = _by_content(real)
    EngineCore.add_lora = _told_of_loading(EngineCore.add_lora)
    EngineCore.remove_lora = _told_of_removing(EngineCore.remove_lora)


def _by_content(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(generate_block_hash_extra_keys)
    def extra_keys(request: Request, *place: int) -> Any:  # noqa: ANN401 - vLLM has no stubs
        keys, next_input = real(request, *place)
        if request.lora_request is None:
            return keys, next_input
        named = (_TAG, request.lora_request.lora_name, ADAPTERS.digest_for(request))
        return tuple(named if key[0] == _TAG else key for key in keys or ()) or None, next_input

    return extra_keys


def _told_of_loading(real: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(real)
    def add_lora(engine: EngineCore, lora_request: LoRARequest) -> bool:
        before = _state_of(lora_request.lora_path)
        is_loaded = real(engine, lora_request)  # raises: the adapters loaded before stay
        ADAPTERS.loaded(lora_request, before)
        return is_loaded

    return add_lora


def _told_of_removing(real: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(real)
    def remove_lora(engine: EngineCore, lora_id: int) -> bool:
        ADAPTERS.remove(lora_id)
        return real(engine, lora_id)

    return remove_lora


def _look_at(path: str) -> _Adapter:
    """Read an adapter. It has no digest if it changes meanwhile or isn't there."""
    before = _state_of(path)
    digest = hashlib.sha256()
    try:
        for file in _files_of(path):
            digest.update(f"{file.name}\0".encode("utf-8", "surrogateescape"))
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    except OSError:
        return _Adapter(path, before, None)
    is_whole = before and before == _state_of(path)
    return _Adapter(path, before, digest.hexdigest()[:_DIGEST_HEX_DIGITS] if is_whole else None)


def _state_of(path: str) -> _State:
    """Return a state that changes with every write to an adapter's files; empty: no files."""
    try:
        states = [(file.name, file.stat()) for file in _files_of(path)]
    except OSError:
        return ()
    return tuple((name, each.st_size, each.st_mtime_ns, each.st_ino) for name, each in states)


def _files_of(path: str) -> Iterator[Path]:
    folder = _folder_of(path)
    if folder is None:
        return iter(())
    return iter(sorted({file for name in _NAMES for file in folder.glob(name)}))


def _folder_of(path: str) -> Path | None:
    """Return an adapter's folder on this host, resolved as vLLM does; None: nowhere, or not yet."""
    folder = Path(path).expanduser()
    if folder.is_absolute() or folder.exists():
        return folder
    try:  # the name of a hub's repository: vLLM's download of it, by its commit
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
