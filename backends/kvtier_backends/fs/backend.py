"""The ``fs`` tier's driver: options in, block files out, threads in between.

Loads, stores and probes have threads of their own, so that what hangs in one
keeps nobody from the others. A call runs in one thread, block after block.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from anyio import move_on_after

from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.backend import (
    Backend,
    BackendContext,
    BackendTraits,
    CellKind,
    LoadBlock,
    Loaded,
    Outcome,
    StoreBlock,
)
from kvtier.plugin_api.log import log
from kvtier.plugin_api.options import Options
from kvtier.plugin_api.threads import DaemonThreads
from kvtier_backends.fs.files import BlockFiles
from kvtier_backends.fs.folder import (
    FolderRefusal,
    prepare_namespace,
    prepare_root,
    probe_direct,
)
from kvtier_backends.fs.layout import make_layout
from kvtier_backends.incidents import IncidentLog, TierCounters
from kvtier_backends.posix import fault_of_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier_backends.fs.layout import Layout
    from kvtier_backends.fs.place import Place

_PROBE_THREADS = 2
_CLOSE_TIMEOUT_S_MAX = 1.0

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class FsBackend(Backend):
    """Keeps each block in a file of its own below ``root_dir``.

    Options: ``root_dir`` (a folder, made if missing), ``layout`` (``kvtier`` or
    ``vllm``), ``unchecked`` (``accept`` or ``refuse`` files without a trailer;
    by default only layout ``vllm`` accepts), ``n_read_threads``,
    ``n_write_threads`` (16 each) and ``direct`` (O_DIRECT where it works; true).

    A cancelled call leaves its thread at work until it ends by itself: the
    buffers of a cancelled load may still be written to, by a hung medium much
    later. ``close`` waits a second at most.
    """

    type_name: ClassVar[str] = "fs"
    medium: ClassVar[str] = "STORAGE"
    cell: ClassVar[CellKind] = "process"
    """A network filesystem's call may hang for good: its process can't end, the engine's can."""

    def __init__(
        self,
        layout: Layout,
        place: Place,
        context: BackendContext,
        *,
        read_threads: int,
        write_threads: int,
        direct: bool,
        accept_unchecked: bool,
    ) -> None:
        self.traits = BackendTraits(
            load_batches_max=read_threads,
            store_batches_max=write_threads,
            capacity_blocks=None,
            accepts_unchecked=accept_unchecked,
        )
        name = context.tier_name
        self._root = place.path
        self._counters = TierCounters()
        self._incidents = IncidentLog("fs", name, place.path, self._counters)
        self._files = BlockFiles(
            layout,
            place,
            context.block_bytes,
            self._counters,
            self._incidents,
            direct=direct,
            accept_unchecked=accept_unchecked,
        )
        self._readers = DaemonThreads(read_threads, f"{name}-read")
        self._writers = DaemonThreads(write_threads, f"{name}-write")
        self._probers = DaemonThreads(_PROBE_THREADS, f"{name}-probe")
        self._closed = False
        self._stores_lock = threading.Lock()
        self._stores_running = 0
        self._tier_name = name

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: BackendContext) -> FsBackend:
        """Check the options and get the folders ready, or refuse them with a ``ConfigError``."""
        given = _read(options, context)
        root = given.root_dir
        layout = make_layout(given.layout, root, context)
        refusal = FolderRefusal(context.tier_name, options["root_dir"])
        place = prepare_root(root, refusal)
        prepare_namespace(place, layout, refusal)
        direct_works = probe_direct(place, refusal, wanted=given.direct)
        if given.direct and not direct_works:
            log.warning(
                "fs tier: this filesystem does not take O_DIRECT; going through the page cache",
                tier=context.tier_name,
                root_dir=root,
            )
        return cls(
            layout,
            place,
            context,
            read_threads=given.n_read_threads,
            write_threads=given.n_write_threads,
            direct=direct_works,
            accept_unchecked=given.accept_unchecked,
        )

    @classmethod
    def check_options(cls, options: Mapping[str, Any], context: BackendContext) -> str:
        """Check the options, and look at the folder as it is."""
        root = _read(options, context).root_dir
        fault = fault_of_folder(root)
        if fault is not None:
            raise FolderRefusal(context.tier_name, options["root_dir"]).error(fault)
        return os.path.realpath(root)

    @property
    def place(self) -> str:
        """The folder, with links resolved."""
        return os.path.realpath(self._root)

    async def open(self) -> None:
        """Leave a marker, and start to sweep what dead engines left unfinished, if any did."""
        await self._writers.run(self._announce)

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Look each file up. A file of the wrong size counts as missing."""
        return await self._probers.run(partial(_each, self._files.exists, keys))

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Read the blocks one after the other, in one thread."""
        return await self._readers.run(partial(_each, self._files.load, blocks))

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Write the blocks one after the other, in one thread."""
        return await self._writers.run(partial(self._store_all, blocks))

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the files of these keys."""
        await self._writers.run(partial(_each, self._files.remove, keys))

    async def close(self) -> None:
        """Let the threads end after what they run now. Waits a second at most."""
        if self._closed:
            return
        self._closed = True
        with self._stores_lock:
            idle = self._stores_running == 0
        if idle:
            # Otherwise a thread may hang in a store; the marker has its leavings swept later.
            with move_on_after(_CLOSE_TIMEOUT_S_MAX):
                await self._writers.run(self._files.sign_off)
        for threads in (self._readers, self._writers, self._probers):
            threads.stop()

    def busy_threads(self) -> int:
        """Count the calls that may still touch a block's buffer, cancelled and hung ones too."""
        return self._readers.busy() + self._writers.busy()

    def counters(self) -> Mapping[str, int]:
        """Return counts of what went wrong, by kind; kinds that never did are left out."""
        return self._counters.counts()

    def _announce(self) -> None:
        dead = self._files.announce()
        if dead:
            # A walk over all folders: not in the way of anything, and not waited for.
            threading.Thread(
                target=self._files.sweep,
                args=(lambda: not self._closed, dead),
                name=f"{self._tier_name}-sweep",
                daemon=True,
            ).start()

    def _store_all(self, blocks: Sequence[StoreBlock]) -> list[Outcome]:
        with self._stores_lock:
            self._stores_running += 1
        try:
            return [self._files.store(block) for block in blocks]
        finally:
            with self._stores_lock:
                self._stores_running -= 1


@dataclass(frozen=True)
class FsOptions:
    """The options, read."""

    root_dir: str = field(
        metadata=option.required(
            Options.path,
            "the folder; created if missing. Refused: not writable; writable by everyone; holds "
            "other blocks",
        )
    )
    layout: Literal["kvtier", "vllm"] = option.text(
        "kvtier", '`"vllm"`: the folder of vLLM\'s own `fs` tier', choices=("kvtier", "vllm")
    )
    unchecked: Literal["accept", "refuse"] | None = option.text(
        None,
        '`"accept"` serves a file without a checksum (default with layout `vllm`), `"refuse"` '
        "treats it as a miss (default otherwise)",
        choices=("accept", "refuse"),
    )
    n_read_threads: int = option.integer(16, "threads that read", minimum=1, maximum=1024)
    n_write_threads: int = option.integer(16, "threads that write", minimum=1, maximum=1024)
    direct: bool = option.flag("use O_DIRECT where the filesystem supports it", default=True)

    @property
    def accept_unchecked(self) -> bool:
        """Whether a file without a checksum is served."""
        return self.unchecked == "accept" if self.unchecked else self.layout == "vllm"


def _read(options: Mapping[str, Any], context: BackendContext) -> FsOptions:
    """Read the options. Raises ``ConfigError``."""
    reader = Options(options, f"secondary tier {context.tier_name}")
    given = FsOptions(**option.read(FsOptions, reader))
    reader.finish()
    return given


def _each(call: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    return [call(item) for item in items]
