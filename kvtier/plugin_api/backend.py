"""The protocol between a secondary tier and the driver of one storage technology.

A backend moves bytes and knows nothing of policy: it is given keys and
memoryviews, and reports one outcome per block. It may raise anything, hang
for ever or return wrong bytes; the layers above cope (``kvtier/tier/backend_driver.py``
checks every loaded block against the digest that it stored).

A third party registers a class under the entry-point group
``kvtier.backends`` and runs ``kvtier.testing.check_backend`` over it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

import xxhash

from kvtier.plugin_api.store_turns import StoreTurns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvtier.plugin_api.keys import RequestId
    from kvtier.plugin_api.metrics import BackendMetric

DIGEST_BYTES = 16
"""Length of a ``block_digest``."""

DIGEST_STEP_BYTES: Final = 1 << 16
"""Bytes that one step of a digest hashes. xxhash releases the GIL for 100 KB and more, and a thread
that wants it back waits for Python's switch interval, 5 ms, while the scheduler is busy; a step
takes some microseconds."""


def block_digest(key: bytes, buffer: memoryview, step_bytes: int = DIGEST_STEP_BYTES) -> bytes:
    """Return the 16-byte XXH3-128 digest over the key and the block's bytes.

    The key is part of it, so that sound bytes filed under the wrong key fail
    too. Holds the GIL: about 0.1 ms for 1 MiB. With ``step_bytes`` of 100 KB and more it
    releases the GIL for each of these steps.
    """
    state = xxhash.xxh3_128(key)
    if buffer.nbytes <= step_bytes:
        state.update(buffer)
        return state.digest()
    for start in range(0, buffer.nbytes, step_bytes):
        state.update(buffer[start : start + step_bytes])
    return state.digest()


class Outcome(IntEnum):
    """Outcome of one block."""

    DONE = 0  #: store: the tier has it. load: the bytes are in the buffer.
    ABSENT = 1  #: load: the tier does not have it. store: it was of no use (``ServedRequest``).
    DAMAGED = 2  #: load: the copy is torn, foreign or fails its check.
    FAILED = 3  #: the medium failed; the state of the copy is unknown.
    FULL = 4  #: store: no room. Nothing was kept.


class Connection(IntEnum):
    """State of a backend's connection to the server that it needs."""

    UP = 0
    CONNECTING = 1  #: not reached yet
    GONE = 2  #: was reached, and is no longer; the backend retries


class StoreBlock(NamedTuple):
    """One block to store. ``buffer`` is read-only for the backend."""

    key: bytes
    buffer: memoryview
    digest: bytes


class _KeyAndBuffer(NamedTuple):
    key: bytes
    buffer: memoryview


class LoadBlock(_KeyAndBuffer):
    """One block to load into ``buffer``, which is exactly one block long.

    A pair of ``key`` and ``buffer``.
    """

    on_read: Callable[[], object] | None = None
    """If set, a backend may call it in the thread that has filled ``buffer``, at once and last.

    It computes the digest that the tier compares, while the bytes are in the processor's cache, and
    releases the GIL for that. Where it is not called, the tier computes the digest later."""

    @classmethod
    def with_report(
        cls, key: bytes, buffer: memoryview, on_read: Callable[[], object]
    ) -> LoadBlock:
        """Return a block with an ``on_read``."""
        block = cls(key, buffer)
        block.on_read = on_read
        return block


class Loaded(NamedTuple):
    """Result of a load. ``digest`` is the one given to ``store``, None if unknown."""

    outcome: Outcome
    digest: bytes | None = None


@dataclass(frozen=True)
class Namespace:
    """Everything that changes the bytes of a block, by name.

    ``facts`` must be JSON values (str, int, float, bool, None, lists and
    mappings of them). Two engines may share blocks only if all facts agree.
    ``vllm_fields`` holds the values that vLLM itself puts into its folder name, for the
    backends that support vLLM's layout; ``vllm_rank`` is the rank in it.
    ``local_facts``, JSON values too, are valid on this machine only, and more
    specific: for tiers that no other machine reads (``on_this_machine``).
    """

    facts: Mapping[str, Any]
    vllm_fields: Mapping[str, Any] | None = None
    vllm_rank: int = 0
    vllm_refusal: str = ""  #: why ``vllm_fields`` is None, and what to do, as half a sentence
    local_facts: Mapping[str, Any] = field(default_factory=dict)

    def on_this_machine(self) -> Namespace:
        """Return the namespace of a tier whose blocks are read on this machine only."""
        if not self.local_facts:
            return self
        facts = {**self.facts, "on_this_machine": dict(self.local_facts)}
        return replace(self, facts=facts, local_facts={})


@dataclass(frozen=True)
class BackendContext:
    """Facts about a backend's surroundings, besides its own options."""

    block_bytes: int
    namespace: Namespace
    tier_name: str  #: for log lines and thread names, e.g. ``"1:fs"``
    engine_pid: int = field(default_factory=os.getpid)
    """The process id to show to users: a tier may run in another process, which they don't know."""
    filesystem: int | None = None
    """The number of the filesystem that the tier's folder was on before the tier was restarted.

    A backend makes no folder on another one: the filesystem may currently be unmounted."""
    wait_s: float = 0.0
    """How long ``from_options`` may wait for a place that another engine uses, in seconds.

    0 at the engine's start. Later a wait blocks nothing, as the engine already runs without the
    tier."""
    engine: object = None
    """The engine's object for a backend that ``needs_engine``; None in a tier's own process."""
    read_only: bool = False
    """Neither blocks nor anything beside them may be written; ``store`` is not called."""


@dataclass(frozen=True)
class BackendTraits:
    """Facts that the tier above needs to feed a backend well."""

    load_batches_max: int  #: how many ``load`` calls may run at once
    store_batches_max: int  #: how many ``store`` calls may run at once
    capacity_blocks: int | None = None
    """How many blocks fit, if the tier is this engine's alone: the tier above
    then tracks the stored blocks, needs no probe, and evicts by calling ``remove``.
    None for a tier that others may change."""
    accepts_unchecked: bool = False
    """Serve blocks for which ``load`` has no digest. Off: they count as damaged."""
    load_batch_blocks_min: int = 1
    """Loads are not cut into calls of fewer blocks than this: if a call costs more
    than its blocks, they are better moved together."""
    store_batch_blocks_min: int = 1
    """The same for stores. No request waits for a store, so large calls do no harm."""
    load_batch_blocks_max: int = 16
    """The most blocks in one call: enough that a call is worth its hand-over to a thread, few
    enough that other calls need not wait long for it."""
    store_batch_blocks_max: int = 16
    """The same for stores."""
    request_scoped: bool = False
    """Its contents depend on the request. Requests with parameters for it (vLLM's
    ``kv_transfer_params``) are served, and their blocks stored, through ``begin_request``. It is
    not notified of other requests, and its contents are not remembered. Not with a capacity."""
    serves_others: bool = False
    """It requests blocks by itself (``on_wanted``): the engine keeps stepping while it is idle,
    since such a request would otherwise go unnoticed."""
    presence_ttl_s: float | None = None
    """For how many seconds a stored block is assumed to exist: after that the tier is probed again.
    For storage where others evict. None: until a load finds it gone, or ``on_lost`` reports it. Not
    with a capacity."""
    connects: bool = False
    """It needs a server, and reports its connection's state (``on_connection``). Until it has, it
    counts as ``CONNECTING``, and the engine's start waits for it, for ``startup_connect_timeout_s``
    at most."""
    probe_batches_max: int | None = None
    """How many ``probe`` calls may run at once. None: as many as ``load`` calls."""
    probe_batch_blocks_min: int = 16
    """Probes are not cut into calls for fewer keys than this: set more if a call is expensive and a
    key cheap."""
    probe_batch_blocks_max: int = 64
    """The most keys in one ``probe`` call. A short probe may wait for one such call to end."""


Isolation: TypeAlias = Literal["thread", "process"]
"""The host of a tier's cell: a thread of the engine's process, or a process of its own."""


class ServedRequest(ABC):
    """One running request, at a request-scoped backend. All methods run on the loop's thread.

    Calls overlap as those of ``Backend`` do, which documents what each of them means.
    """

    @abstractmethod
    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether a load is likely to find it for this request."""

    @abstractmethod
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Read each block into its buffer; return one result per block, in order."""

    @abstractmethod
    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Take each block of the request; return one outcome per block, in order.

        Digests are empty: nothing is checked against them. ABSENT does not mean that the tier
        failed: it had no use for the block.
        """

    @abstractmethod
    def end(self) -> None:
        """Note that the request makes no more calls; earlier ones may still be in flight."""

    def prefix_hits(self, keys: Sequence[bytes]) -> None:  # noqa: B027 - those who want all need it not
        """Note that these blocks of the next ``store`` were here before the request.

        A backend that wants only the blocks that the request computes returns ABSENT for them.
        """

    def missing(self, keys: Sequence[bytes]) -> None:  # noqa: B027 - those who want none need none
        """Note that these blocks, which the backend wanted, are not available."""


class Backend(ABC):
    """Drives one storage technology for one tier of one engine.

    All coroutines run on the tier cell's event loop; work that blocks belongs
    in threads (``kvtier.plugin_api.threads.DaemonThreads``). Calls overlap, up to the
    limits in ``traits``, and may use the same key (after a reset, or from another engine).
    ``kvtier.plugin_api.deadlines.time_left_s`` returns how long a call is still waited for.
    """

    #: Call it on the loop's thread when blocks are gone for reasons of the backend's own, or of
    #: others who use the storage. It must be called if there is a capacity. Set before ``open``.
    on_lost: Callable[[Sequence[bytes]], None] = staticmethod(lambda _keys: None)

    #: Call it on the loop's thread when the state of the connection to a server changes. While
    #: that is not ``UP``, the tier gets no work, and no request waits for it: ``open`` need not
    #: wait for the server. A backend that never calls it counts as ``UP``,
    #: unless ``traits.connects``. Set before ``open``.
    on_connection: Callable[[Connection], None] = staticmethod(lambda _state: None)

    #: Call it on the loop's thread to get blocks of the engine's memory, for example for a request
    #: of another engine. Available blocks are passed to ``ServedRequest.store``, and stay until it
    #: returns; the others to ``missing``. Set before ``open``, if ``traits.request_scoped``.
    on_wanted: Callable[[RequestId, Sequence[bytes], ServedRequest], None] = staticmethod(
        lambda _request, _keys, _served: None
    )

    #: Call it when the request is over: further blocks for it are of no use.
    on_wanted_no_more: Callable[[RequestId], None] = staticmethod(lambda _request: None)

    #: Gives loads priority over stores that have begun: a thread that stores block after block
    #: waits for its turn before each. Set before ``open``; without a tier, nothing waits.
    store_turns: StoreTurns = StoreTurns()

    type_name: ClassVar[str]  #: the ``type`` in ``secondary_tiers``
    medium: ClassVar[str] = "STORAGE"  #: vLLM's word for KV events: CPU or STORAGE
    isolation: ClassVar[Isolation] = "thread"
    """Its preferred host, unless the tier's configuration says otherwise."""
    needs_engine: ClassVar[bool] = False
    """It is part of an engine (``BackendContext.engine``), and runs only in the engine's
    process."""
    metrics: ClassVar[Mapping[str, BackendMetric]] = {}
    """Metrics that ``counters`` returns, by name: each is exported as ``kvtier:TYPE_NAME``."""
    traits: BackendTraits

    @classmethod
    @abstractmethod
    def from_options(cls, options: Mapping[str, Any], context: BackendContext) -> Backend:
        """Build from the tier's own configuration keys.

        Runs before any cell, in a thread of its own or in the tier's process, and
        may wait for storage: the engine stops waiting after ``start_timeout_s``.
        Raises ``ConfigError`` for an unknown key, a wrong type or an unusable
        place. If that is raised ``from`` an ``OSError`` or a ``StoreFault``, or
        if these themselves are raised, the storage fails, which may pass:
        with ``on_unusable`` the engine then starts without the tier.
        """

    @classmethod
    def check_options(cls, options: Mapping[str, Any], context: BackendContext) -> str | None:  # noqa: ARG003 - for those that check
        """Refuse options that ``from_options`` would, as far as possible without changing anything.

        For ``kvtier check``: makes and claims nothing. ``context.block_bytes`` is 0 and the
        namespace empty if they are not known. Returns ``place``, if it can be determined. Raises
        ``ConfigError``. The default has nothing to refuse.
        """
        return None

    @classmethod
    def check_keys(cls, options: Mapping[str, Any], context: BackendContext) -> None:  # noqa: ARG003 - as above
        """Refuse bad keys as ``from_options`` would: a mistyped one, for example.

        Called in each worker before a model is loaded, with ``context`` as in ``check_options``.
        Does not touch the tier's storage, and connects to nothing. Raises ``ConfigError``. The
        default has nothing to refuse.
        """
        return

    @classmethod
    def check_connection(cls, options: Mapping[str, Any], context: BackendContext) -> str | None:  # noqa: ARG003 - as above
        """Try the storage: reach it, log in, and store, load and remove a small object.

        For ``kvtier check --connect``, after ``check_options`` and in a thread of its own. Leaves
        nothing behind, and claims nothing. Returns in a few words what worked. Raises
        ``ConfigError`` for the step that fails, with the missing permission and the remedy. The
        default tries nothing, and returns None.
        """
        return None

    @classmethod
    def medium_of(cls, options: Mapping[str, Any]) -> str | None:  # noqa: ARG003 - for those whose medium depends on them
        """Return the medium of a tier with these options; None if vLLM has no word for it."""
        return cls.medium

    @property
    def place(self) -> str | None:
        """The folder or address of the blocks, which no other tier of this engine may use."""
        return None

    @property
    def filesystem(self) -> int | None:
        """The number of the filesystem that the folder is on (``st_dev``), if there is a folder.

        Touches no storage. A later life of the tier gets it in its context.
        """
        return None

    def discard(self) -> None:
        """Release everything that ``from_options`` took. Called instead of ``open``. May hang.

        Called if the engine does not start after all, or ends meanwhile.
        """
        return

    def begin_request(self, request: RequestId, params: Mapping[str, Any]) -> ServedRequest:
        """Return the object serving a request with these parameters, if ``traits.request_scoped``.

        Called on the loop's thread, before anything else of the request.
        """
        raise NotImplementedError

    async def open(self) -> None:
        """Get ready. Called once, first. Raising disables the tier; the engine continues."""
        return

    async def register_memory(self, slots: memoryview) -> None:  # noqa: B027 - most need none
        """Get ready to transfer from and to this memory, which all buffers are part of.

        Called once, after ``open`` and before the first transfer, for backends that have to
        register memory (RDMA). ``slots``: all of them, writable. It stays mapped until ``close``
        has returned and ``busy_threads`` is 0. Raising disables the tier, as in ``open``.
        """

    def contents(self) -> Iterable[Sequence[bytes]]:
        """Return the blocks that a backend with a capacity has kept from before, once it is open.

        In batches that were stored together, from head to tail; the batch
        stored longest ago first. Everything that takes room must be included: nothing
        else is ever evicted. Stores and removals continue meanwhile; blocks stored or
        removed since may be named or not. Blocks that no longer fit are removed.
        """
        return ()

    @abstractmethod
    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return for each key whether a load is likely to find it. Not a guarantee."""

    @abstractmethod
    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Read each block into its buffer; return one result per block, in order."""

    @abstractmethod
    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Keep each block; return one outcome per block, in order. A key that exists is DONE.

        The blocks may be of several requests.
        """

    @abstractmethod
    async def remove(self, keys: Sequence[bytes]) -> None:
        """Forget these keys. Unknown keys are not an error. Raise if any may still be there.

        With a capacity, it is called for victims, for damaged blocks, and for
        blocks that a failed ``store`` may have kept. If it raises, it is called again.
        """

    async def close(self) -> None:
        """Release everything that ``open`` took. Called once, last; may be skipped after a hang."""
        return

    def busy_threads(self) -> int:
        """Return the number of threads that may still touch a buffer. Any thread may call it.

        After ``close`` the slots' memory stays mapped until this is 0.
        """
        return 0

    def counters(self) -> Mapping[str, int]:
        """Return the values of ``metrics``, by name: its work, faults and losses.

        Any thread may call it, also while calls run. A counter that is left out is 0; a gauge
        that is left out is not known.
        """
        return {}
