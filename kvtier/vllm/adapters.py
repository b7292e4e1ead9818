"""LoRA adapters by what they hold: an adapter that was replaced at its name and path is another.

vLLM's block hashes have an adapter's name and path. ``know_adapters`` has them carry a digest of
its files in place of the path: in the scheduler's process, where requests are hashed, so that it
holds for vLLM's own prefix cache, for host memory and for each tier alike, and for two hosts that
have the same adapter. The files are read once for each adapter that is loaded: when the engine is
told to load it, or else with its first request, by the thread that takes in requests.

A worker goes on with the adapter that it has loaded, whatever becomes of the files, and reads them
again when it had to make room for others. So an adapter whose files have changed since, or can't
be read, computes nobody knows what: such a request has hashes of its own, which no other has. And
what runs while an adapter is loaded again in place is computed with both: it is not stored.
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
from kvtier.vllm.hooking import once_a_process

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
    digest: str | None  #: None: it can't be told


class Adapters:
    """The adapters that one process's engines have loaded, by vLLM's number of them. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[int, _Adapter] = {}
        self._live: WeakValueDictionary[str, Request] = WeakValueDictionary()
        self.mixed: set[str] = set()  #: requests that ran while their adapter was replaced
        self._said: set[tuple[str, _State]] = set()

    def loaded(self, request: LoRARequest, before: _State) -> None:
        """Take in that an adapter has been loaded. Reads its files.

        ``before``: their state before that; empty if they came with it, from a hub.
        """
        with self._lock:
            known = self._loaded.get(request.lora_int_id)
            if known is not None and not request.load_inplace:
                return  # the worker goes on with what it has
            now = _look_at(request.lora_path)
            is_sure = before in ((), now.state)
            self._take(request.lora_int_id, now if is_sure else _Adapter(now.path, now.state, None))

    def forget(self) -> None:
        """Forget all adapters: a new engine loads them anew."""
        with self._lock:
            self._loaded.clear()

    def remove(self, number: int) -> None:
        """Forget an adapter: its number may become another's."""
        with self._lock:
            self._loaded.pop(number, None)

    def _take(self, number: int, adapter: _Adapter) -> _Adapter:
        """Know an adapter from now on. Who runs with another one is computed with both."""
        known = self._loaded.get(number)
        self._loaded[number] = adapter
        if known is not None and (adapter.digest is None or adapter.digest != known.digest):
            for name, request in self._live.items():
                if request.lora_request.lora_int_id == number:
                    self.mixed.add(name)
        return adapter

    def digest_for(self, request: Request) -> str:
        """Return what stands for the content of a request's adapter, for as long as it runs."""
        digest: str | None = getattr(request, "kvtier_adapter", None)
        if digest is None:
            digest = self.digest(request.lora_request)
            request.kvtier_adapter = digest
            with self._lock:
                self._live[request.request_id] = request
        return digest

    def digest(self, request: LoRARequest) -> str:
        """Return what stands for an adapter's content; what can't be told is like nothing else."""
        with self._lock:
            known = self._loaded.get(request.lora_int_id)
            now = _state_of(request.lora_path)
            if known is None or (now != known.state and (request.load_inplace or not known.state)):
                known = self._take(request.lora_int_id, _look_at(request.lora_path))
            is_same = (known.path, known.state) == (request.lora_path, now)
            if known.digest is not None and is_same:
                return known.digest
            self._say_once(request, now, is_same=is_same)
            return f"unknown-{uuid4().hex}"

    def _say_once(self, request: LoRARequest, now: _State, *, is_same: bool) -> None:
        if (request.lora_path, now) not in self._said:
            self._said.add((request.lora_path, now))
            log.warning(
                "nothing tells what this LoRA adapter holds: its requests find nothing of one "
                "another. Load it in place (load_inplace), or from another path, after its files "
                "have changed"
                if not is_same
                else "this LoRA adapter's files can't be read: its requests find nothing of one "
                "another. Load it from a folder of this host",
                adapter=request.lora_name,
                path=request.lora_path,
            )


ADAPTERS: Final = Adapters()
"""Of this process."""


def know_adapters() -> None:
    """Have block hashes tell adapters apart by content: of an engine that starts in this process.

    It has loaded none yet, whatever another engine had loaded here before.
    """
    ADAPTERS.forget()
    _hook_adapters()


@once_a_process
def _hook_adapters() -> None:
    kv_cache_utils.generate_block_hash_extra_keys = _by_content(generate_block_hash_extra_keys)
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
        is_loaded = real(engine, lora_request)  # raises: what was loaded before stays
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
    """Read an adapter. One that changes meanwhile, or that isn't there, can't be told."""
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
    """Return what changes whenever somebody writes one of an adapter's files; empty: no files."""
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
    """Return where an adapter is on this host, as vLLM finds it; None: nowhere, or not yet."""
    folder = Path(path).expanduser()
    if folder.is_absolute() or folder.exists():
        return folder
    try:  # the name of a hub's repository: what vLLM has downloaded, by its commit
        return Path(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None
