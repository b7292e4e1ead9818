"""The ``fs`` tier's driver: options in, block files out, threads in between.

Loads, stores and probes have separate threads, so that a hang in one does not
block the others. A call runs in one thread, block after block; for each block
the thread releases the GIL while it is in the kernel.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from anyio import move_on_after
from msgspec import Meta

from kvtier.plugin_api import option_fields as option
from kvtier.plugin_api.backend import (
    Backend,
    BackendContext,
    BackendTraits,
    Isolation,
    LoadBlock,
    Loaded,
    Outcome,
    StoreBlock,
)
from kvtier.plugin_api.log import log
from kvtier.plugin_api.metrics import CAPACITY_BYTES, USED_BYTES, Counter, Gauge
from kvtier.plugin_api.options import Options
from kvtier.plugin_api.threads import DaemonThreads, daemon_thread, start_thread
from kvtier_backends.fs.bound.folder_bound import FolderBound
from kvtier_backends.fs.bound.removals import Announced
from kvtier_backends.fs.bound.writer import NoGrant
from kvtier_backends.fs.files import BlockFiles
from kvtier_backends.fs.folder import (
    FolderRefusal,
    prepare_namespace,
    prepare_root,
    probe_direct,
    refuse_bare_mount_point,
)
from kvtier_backends.fs.forms import TRAILER_BYTES, make_form
from kvtier_backends.fs.layout import make_layout
from kvtier_backends.fs.older_blocks import report_older
from kvtier_backends.incidents import IncidentLog, TierCounters
from kvtier_backends.posix import check_folder, not_working, padded_bytes, try_folder
from kvtier_backends.shared.batches import BATCH_BYTES_MAX, batches_per_thread, blocks_within
from kvtier_backends.shared.metrics import BLOCKS
from kvtier_backends.shared.record_trailer import Form
from kvtier_backends.shared.records import (
    ProtectionOptions,
    make_records,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier.plugin_api.metrics import BackendMetric
    from kvtier_backends.fs.layout import Layout
    from kvtier_backends.fs.open_root import OpenRoot
    from kvtier_backends.shared.records import Records

CAPACITY_BLOCKS_MIN = 64
"""A bound of fewer blocks is refused: there would be few grants, of single blocks."""

SMALL_BLOCK_BYTES = 256 << 10
"""Below it, making a file takes longer than writing it: docs/explanation/disk-cost.md."""

PROBE_BATCH_BLOCKS_MIN = 8
"""Each key is a system call, half a millisecond on a network filesystem: this many blocks are
worth the hand-over to a thread."""

_CLOSE_TIMEOUT_S_MAX = 1.0

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class FsBackend(Backend):
    """Keeps each block in a file of its own below ``root_dir``.

    Options: ``root_dir`` (a folder, created if missing), ``layout`` (``kvtier`` or
    ``vllm``), ``allow_unchecksummed`` (serve files without a trailer;
    by default only layout ``vllm`` does), ``capacity_bytes`` (the folder's capacity, enforced
    by ``bound/``), ``n_read_threads``, ``n_write_threads`` (16 each), ``direct``
    (O_DIRECT where it works; true), ``allow_world_writable`` (false), and those of
    ``kvtier_backends/shared/records.py``: compression, and keys that sign or encrypt.

    A cancelled call keeps its thread until the system call returns: the buffers of
    a cancelled load may still be written to, much later if the medium hangs.
    ``close`` waits a second at most.
    """

    type_name: ClassVar[str] = "fs"
    metrics: ClassVar[Mapping[str, BackendMetric]] = {
        **BLOCKS,
        "blocks_discarded": Counter("Damaged or truncated blocks removed."),
        "removes_failed": Counter("Blocks that could not be removed."),
        "probe_failed": Counter("Lookups that failed."),
        "direct_refused": Counter("Times that the filesystem refused O_DIRECT."),
        "temporaries_swept": Counter("Files removed that writers left unfinished."),
        "loads_unchecked": Counter("Blocks without a checksum that were served."),
        "loads_unchecked_refused": Counter("Blocks without a checksum that were not served."),
        "folder_lost": Counter("Times that the folder was gone or replaced."),
        "folder_returned": Counter("Times that a lost folder could be used again."),
        "upkeep_failed": Counter("Times that upkeep raised."),
        "capacity_bytes": CAPACITY_BYTES,
        "used_bytes": USED_BYTES,
        "folder_blocks": Gauge("Blocks in the folder, on the engine that cleans it."),
        "blocks_evicted": Counter("Blocks that this engine evicted."),
        "stores_not_granted": Counter("Blocks not written because the folder had no room."),
        "space_failed": Counter("Failed rounds of keeping the folder within its capacity."),
        "evictions_failed": Counter("Evictions that failed."),
    }
    medium: ClassVar[str] = "STORAGE"
    isolation: ClassVar[Isolation] = "process"
    """A hung call on a network filesystem keeps its process from ending; the engine's must end."""

    def __init__(  # noqa: PLR0913 - the options, by name
        self,
        layout: Layout,
        place: OpenRoot,
        records: Records,
        *,
        read_threads: int,
        write_threads: int,
        direct: bool,
        accept_unchecked: bool,
        capacity_bytes: int | None = None,
    ) -> None:
        block_bytes = records.context.block_bytes
        per_thread = batches_per_thread(block_bytes)
        blocks_max = min(
            BackendTraits.load_batch_blocks_max, blocks_within(BATCH_BYTES_MAX, block_bytes)
        )
        self.traits = BackendTraits(
            load_batches_max=per_thread * read_threads,
            store_batches_max=per_thread * write_threads,
            load_batch_blocks_max=blocks_max,
            store_batch_blocks_max=blocks_max,
            probe_batches_max=read_threads,
            capacity_blocks=None,
            accepts_unchecked=accept_unchecked,
            probe_batch_blocks_min=PROBE_BATCH_BLOCKS_MIN,
        )
        name = records.context.tier_name
        self._root = place.path
        self._read_only = place.read_only
        self._filesystem = os.fstat(place.root).st_dev
        self._counters = TierCounters()
        self._incidents = IncidentLog("fs", name, place.path, self._counters)
        self._records = records
        self._files = BlockFiles(
            layout,
            place,
            make_form(records),
            self._counters,
            self._incidents,
            direct=direct,
            accept_unchecked=accept_unchecked,
        )
        self._readers = DaemonThreads(read_threads, f"{name}-read")
        self._writers = DaemonThreads(write_threads, f"{name}-write")
        self._probers = DaemonThreads(read_threads, f"{name}-probe")
        self._closed = False
        self._stores_lock = threading.Lock()
        self._stores_running = 0
        self._tier_name = name
        self._layout = layout
        self._announced = Announced(layout)
        self._folder_bound = self._make_keeper(capacity_bytes)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: BackendContext) -> FsBackend:
        """Check the options and prepare the folders, or refuse them with a ``ConfigError``."""
        given, records = _read(options, context)
        root = given.root_dir
        layout = make_layout(given.layout, root, records.context)
        refusal = FolderRefusal(context.tier_name, options["root_dir"])
        _check_capacity(given, options, context)
        refuse_bare_mount_point(layout, context.filesystem, refusal)
        place = prepare_root(
            root,
            refusal,
            allow_world_writable=given.allow_world_writable,
            read_only=context.read_only,
        )
        layout.share_as(os.fstat(place.root).st_mode)
        prepare_namespace(place, layout, refusal)
        direct_works = probe_direct(place, refusal, wanted=given.direct)
        if given.direct and not direct_works:
            log.warning(
                "fs tier: this filesystem does not take O_DIRECT; going through the page cache",
                tier=context.tier_name,
                root_dir=root,
            )
        if records.context.block_bytes < SMALL_BLOCK_BYTES:
            log.info(
                "fs tier: with blocks this small a disk tier is 3 to 10 times as fast, "
                "on a local disk that no other engine uses",
                tier=context.tier_name,
                block_bytes=records.context.block_bytes,
            )
        return cls(
            layout,
            place,
            records,
            read_threads=given.n_read_threads,
            write_threads=given.n_write_threads,
            direct=direct_works,
            accept_unchecked=given.accept_unchecked,
            capacity_bytes=given.capacity_bytes,
        )

    @classmethod
    def check_keys(cls, options: Mapping[str, Any], context: BackendContext) -> None:
        """Check the options and the key files that they name."""
        given, _ = _read(options, context)
        if context.block_bytes:
            _check_capacity(given, options, context)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], context: BackendContext) -> str:
        """Check the options, and the folder in its current state."""
        given, _ = _read(options, context)
        _check_capacity(given, options, context)
        root = given.root_dir
        check_folder(
            root,
            FolderRefusal(context.tier_name, options["root_dir"]).error,
            allow_world_writable=given.allow_world_writable,
            read_only=context.read_only,
        )
        return os.path.realpath(root)

    @classmethod
    def check_connection(cls, options: Mapping[str, Any], context: BackendContext) -> str:
        """Write, read and remove a file in the folder, if that is allowed."""
        if context.read_only:
            return "its folder exists and may be read"
        try:
            return try_folder(_read(options, context)[0].root_dir)
        except OSError as problem:
            refusal = FolderRefusal(context.tier_name, options["root_dir"])
            raise refusal.error(not_working(problem)) from problem

    @property
    def place(self) -> str:
        """The folder, with links resolved."""
        return os.path.realpath(self._root)

    @property
    def filesystem(self) -> int:
        """Device number of the folder's filesystem when it was opened."""
        return self._filesystem

    async def open(self) -> None:
        """Leave a marker, and start to sweep the unfinished files of dead engines, if any."""
        if not self._read_only:
            await self._writers.run(self._announce)
        if self._folder_bound is not None:
            self._folder_bound.start()

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Look each file up. A file of the wrong size counts as missing."""
        look = partial(_each, self._files.exists, keys)
        if self._folder_bound is None:
            return await self._probers.run(look)
        with self._announced.asked(keys):
            there = await self._probers.run(look)
            both = list(zip(keys, there, strict=True))  # the tier above announces the results
            self._announced.add(key for key, is_there in both if is_there)
            self._announced.forget(key for key, is_there in both if not is_there)
        return there

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Read the blocks one after the other, in one thread."""
        answers = await self._readers.run(partial(_each, self._files.load, blocks))
        if self._folder_bound is not None:
            gone = (block.key for block, one in zip(blocks, answers, strict=True) if _is_gone(one))
            self._announced.forget(gone)  # the tier above reports that itself
        return answers

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Write the blocks one after the other, in one thread; loads have priority before each."""
        if self._folder_bound is None:
            return await self._writers.run(partial(self._store_all, blocks))
        outcomes: list[Outcome] = []
        while len(outcomes) < len(blocks):
            rest = blocks[len(outcomes) :]
            outcomes += await self._writers.run(partial(self._store_all, rest))
            missing = len(blocks) - len(outcomes)
            if missing and not await self._folder_bound.wait_for_room(missing):
                self._counters.add("stores_not_granted", missing)
                outcomes += [Outcome.FULL] * missing
        both = zip(blocks, outcomes, strict=True)
        self._announced.add(block.key for block, end in both if end is Outcome.DONE)
        return outcomes

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the files of these keys."""
        await self._writers.run(partial(_each, self._files.remove, keys))

    async def close(self) -> None:
        """Let each thread end after its current call. Waits a second at most."""
        if self._closed:
            return
        self._closed = True
        with self._stores_lock:
            idle = self._stores_running == 0
        if idle:
            # Otherwise a thread may hang in a store; a later engine sweeps its files by the marker.
            with move_on_after(_CLOSE_TIMEOUT_S_MAX):
                if self._folder_bound is not None:
                    await self._folder_bound.stop()
                await self._writers.run(self._files.sign_off)
        if self._folder_bound is not None:
            self._folder_bound.discard()
        for threads in (self._readers, self._writers, self._probers):
            threads.stop()

    def busy_threads(self) -> int:
        """Count the calls that may still touch a block's buffer, also cancelled and hung ones."""
        return self._readers.busy() + self._writers.busy()

    def counters(self) -> Mapping[str, int]:
        """Return error counts by kind, without those that are zero.

        With a capacity, also that and the number of evicted blocks; on the engine that cleans,
        the bytes and blocks in the folder too.
        """
        counts = {**self._counters.counts(), **self._records.counts()}
        if self._folder_bound is not None:
            counts.update(self._folder_bound.gauges())
        return counts

    def _make_keeper(self, capacity: int | None) -> FolderBound | None:
        if capacity is None:
            return None
        keeper = FolderBound(
            self._layout,
            self._files.file_bytes,
            capacity,
            self._files.current_place,
            self._removed,
            self._counters,
            self._incidents,
            tier_name=self._tier_name,
        )
        self._files.keep_within_bound(keeper)
        return keeper

    async def _removed(self, names: Sequence[str]) -> None:
        """Report as lost those blocks that this engine has announced and that are really gone."""
        keys = self._announced.of(names)
        if keys:
            there = await self._probers.run(partial(_each, self._files.exists, keys))
            lost = [key for key, is_there in zip(keys, there, strict=True) if not is_there]
            self._announced.forget(lost)
            if lost:
                self.on_lost(lost)

    def _announce(self) -> None:
        dead = self._files.announce()
        others = self._files.neighbours()

        def look_around() -> None:
            if dead:
                self._files.sweep(self._is_open, dead)
            report_older(self._root, self._layout, others, self._tier_name, self._is_open)

        if dead or others:
            # It walks folders, which takes long: in a thread of its own it delays nothing.
            name = f"{self._tier_name}-look"
            try:
                start_thread(daemon_thread(look_around, name, self._report_raised))
            except OSError as no_thread:  # the next engine does it
                self._report_raised(no_thread)

    def _report_raised(self, error: BaseException) -> None:
        self._incidents.report("store", "upkeep_failed", error)

    def _is_open(self) -> bool:
        return not self._closed

    def _store_all(self, blocks: Sequence[StoreBlock]) -> list[Outcome]:
        with self._stores_lock:
            self._stores_running += 1
        outcomes: list[Outcome] = []
        try:
            self._files.begin_stores([block.key for block in blocks])
            with self.store_turns.storing() as wait_for_turn:
                for block in blocks:
                    wait_for_turn()
                    outcomes.append(self._files.store(block))
        except NoGrant:
            pass  # no room for the other blocks yet
        finally:
            with self._stores_lock:
                self._stores_running -= 1
        return outcomes


@dataclass(frozen=True)
class FsOptions(ProtectionOptions):
    """The parsed options."""

    root_dir: option.Path
    """the folder; created if missing. Refused: not writable; writable by everyone; holds other
    blocks"""
    layout: Literal["kvtier", "vllm"] = "kvtier"
    """`"vllm"`: the folder of vLLM's own `fs` tier"""
    allow_unchecksummed: option.Flag | None = None
    """serve a file without a checksum (default with layout `vllm`); otherwise it is a miss"""
    capacity_bytes: Annotated[option.Size, Meta(ge=1)] | None = None
    """size limit of the folder, in all namespaces and for all engines that share it: least
    recently used blocks are evicted. Set the same on all engines. Without it, nothing is evicted"""
    n_read_threads: Annotated[option.Integer, Meta(ge=1, le=1024)] = 16
    """threads that read, and as many that look blocks up"""
    n_write_threads: Annotated[option.Integer, Meta(ge=1, le=1024)] = 16
    """threads that write. During a load, all but one pause between two blocks, and in the half
    second after it, all but four; for at most half of the time"""
    direct: option.Flag = True
    """use O_DIRECT where the filesystem supports it"""
    allow_world_writable: option.Flag = False
    """use a folder that everyone may write to, as on mounts where chmod does nothing (SMB, Azure
    Files, gcsfuse). Anyone who writes there can plant blocks: set a key that signs or encrypts"""

    @property
    def accept_unchecked(self) -> bool:
        """Whether files without a checksum are served."""
        allowed = self.allow_unchecksummed
        return self.layout == "vllm" if allowed is None else allowed


def _read(options: Mapping[str, Any], context: BackendContext) -> tuple[FsOptions, Records]:
    """Parse the options and load the keys that they name. Raises ``ConfigError``."""
    reader = Options(options, f"secondary tier {context.tier_name}")
    given = FsOptions(**option.read(FsOptions, reader))
    records = make_records(reader, context)
    reader.finish()
    if records.form is not Form.PLAIN:
        _refuse_beside(reader, given, "keys", "signed or encrypted blocks")
    if records.are_compressed:
        _refuse_beside(reader, given, "compression", "compressed blocks")
    return given, records


def _refuse_beside(reader: Options, given: FsOptions, what: str, stored: str) -> None:
    """Refuse layouts and files that have no room for keys or compression."""
    if given.layout == "vllm":
        raise reader.error(
            "layout",
            given.layout,
            f"has no room for {stored}: vLLM would neither write nor read them. Set layout to "
            f'"kvtier", or remove the {what}',
        )
    if given.accept_unchecked:
        raise reader.error(
            "allow_unchecksummed",
            given.allow_unchecksummed,
            f"would serve files that are not {stored}. Remove it, or the {what}",
        )


def _check_capacity(given: FsOptions, options: Mapping[str, Any], context: BackendContext) -> None:
    """Refuse a capacity so small that engines would wait for each other. Raises ``ConfigError``."""
    if given.capacity_bytes is not None and context.read_only:
        raise Options(options, f"secondary tier {context.tier_name}").error(
            "capacity_bytes",
            given.capacity_bytes,
            "is for engines that write to the folder, but read_only is set. Remove one",
        )
    least = CAPACITY_BLOCKS_MIN * (padded_bytes(context.block_bytes) + TRAILER_BYTES)
    if given.capacity_bytes is not None and given.capacity_bytes < least:
        raise Options(options, f"secondary tier {context.tier_name}").error(
            "capacity_bytes",
            given.capacity_bytes,
            f"is less than {CAPACITY_BLOCKS_MIN} blocks, with which the engines would wait for one "
            f"another. Give at least {least}",
        )


def _is_gone(loaded: Loaded) -> bool:
    return loaded.outcome in (Outcome.ABSENT, Outcome.DAMAGED)


def _each(call: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    return [call(item) for item in items]
