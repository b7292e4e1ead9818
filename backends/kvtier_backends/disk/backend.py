"""The ``disk`` tier's driver: a folder of one engine, which never exceeds its capacity."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from anyio import move_on_after

from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import (
    Backend,
    BackendContext,
    Isolation,
    LoadBlock,
    Loaded,
    Outcome,
    StoreBlock,
)
from kvtier.plugin_api.options import shown
from kvtier.plugin_api.threads import DaemonThreads, daemon_thread
from kvtier_backends.disk.batch_sizes import disk_traits
from kvtier_backends.disk.device import Device, FileDevice, Segments
from kvtier_backends.disk.disk_options import read_options
from kvtier_backends.disk.folder.capacity import (
    check_memory,
    check_new_folder,
    check_plan,
    check_region_bytes,
    doubts,
)
from kvtier_backends.disk.folder.claim import (
    Claim,
    SuperblockCopy,
    not_ours,
    read_superblock,
    refuse_bare_mount_point,
)
from kvtier_backends.disk.folder.description import describe, tell_of_others
from kvtier_backends.disk.folder.opening import (
    Verdict,
    judge_folder,
    judge_returned_folder,
    prepare_folder,
)
from kvtier_backends.disk.folder.recovery import Expected, Recovery
from kvtier_backends.disk.format import (
    NO_KEY_ID,
    TAG_BYTES,
    PageRefused,
    namespace_digest,
    time_s,
)
from kvtier_backends.disk.log.block_log import BlockLog
from kvtier_backends.disk.log.context import LogContext
from kvtier_backends.disk.log.index import BlockIndex, BulkLoad
from kvtier_backends.disk.log.reader import stored_together
from kvtier_backends.disk.log.regions import (
    Budget,
    Regions,
    RegionState,
    credit_bytes_max,
    regions_ahead,
)
from kvtier_backends.disk.log.tables import Identity
from kvtier_backends.disk.metrics import METRICS
from kvtier_backends.disk.offline.inspection import refuse_folder
from kvtier_backends.disk.offline.purge_requests import answer_requests
from kvtier_backends.disk.opened_files import NotAFile
from kvtier_backends.incidents import ROOM, IncidentLog, TierCounters
from kvtier_backends.posix import (
    NO_ROOM,
    PAGE_BYTES,
    filesystem_of,
    not_working,
    try_folder,
    unusable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvtier.plugin_api.metrics import BackendMetric
    from kvtier_backends.disk.disk_options import DiskOptions

STORES_BESIDE_LOADS_FRACTION: Final = 0.25
"""Fraction of ``io_depth`` that stores keep at the disk while something is loaded."""

TICK_S: Final = 1.0
FOLDER_GONE: Final = (
    "the folder is gone, or was replaced: was its filesystem unmounted? Nothing is stored or "
    "loaded until it is back. A deleted one is made again; to use another filesystem, "
    "start the engine again"
)
SWEEPS_PER_TTL: Final = 20
CLOSE_TIMEOUT_S_MAX: Final = 1.0
_RELEASE_POLL_S: Final = 0.1


class DiskBackend(Backend):
    """Keeps blocks in regions of preallocated files, up to ``capacity_bytes`` in all.

    Options: ``path`` and ``capacity_bytes`` (required), ``region_bytes`` (bytes
    overwritten at once), ``ttl_s`` (seconds until a block expires; 0: never),
    ``io_depth`` (how many loads, and how many stores, run at once; 8), ``direct``
    (O_DIRECT where it works; true), ``allow_world_writable`` (false), ``checksum``
    (``xxh3_128``, and nothing else), and ``encryption_key_file`` or ``encryption_key_env``
    (keys in hex, one a line: the first one writes, the others still read).

    A cancelled call runs on by itself: the buffers of a cancelled load may
    still be written to until ``busy_threads`` returns 0. ``close`` waits at most
    a second; the folder is released when the last thread is done with it.
    """

    type_name: ClassVar[str] = "disk"
    metrics: ClassVar[Mapping[str, BackendMetric]] = METRICS
    medium: ClassVar[str] = "STORAGE"
    isolation: ClassVar[Isolation] = "process"

    def __init__(
        self,
        context: BackendContext,
        claim: Claim,
        verdict: Verdict,
        given: DiskOptions,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock`` returns seconds since 1970."""
        self._encrypted_log = given.encrypted_log
        self.traits = disk_traits(context.block_bytes, given.io_depth, verdict.plan.capacity_blocks)
        self._clock = clock
        # Rewriting a weight file in place changes its time, and no other sign is as reliable.
        self._context = replace(context, namespace=context.namespace.on_this_machine())
        self._claim = claim
        self._verdict = verdict
        self._plan = verdict.plan
        self._path = claim.path
        self._filesystem = filesystem_of(claim.path)
        self._superblock: SuperblockCopy | None = None
        self._ttl_s = given.ttl_s
        self._io_depth = given.io_depth
        # O_DIRECT can't move blocks in place if they are not whole pages.
        self._direct = given.direct and context.block_bytes % PAGE_BYTES == 0
        self._counters = TierCounters()
        self._incidents = IncidentLog("disk", context.tier_name, claim.path, self._counters)
        self._threads = DaemonThreads(1, f"{context.tier_name}-upkeep")
        self._log: BlockLog | None = None
        self._devices: list[Device] = []  # the log's, and any earlier one that still hangs
        self._upkeep: asyncio.Task[None] | None = None
        self._healing: asyncio.Future[None] | None = None
        self._swept = 0
        self._is_closed = False
        self._capacity_bytes = given.capacity_bytes

    @classmethod
    def from_options(cls, options: Mapping[str, Any], context: BackendContext) -> DiskBackend:
        """Check the options and claim the folder, or refuse with a ``ConfigError``."""
        reader, given = read_options(options, context)
        capacity_bytes, region_bytes = given.capacity_bytes, given.region_bytes
        tag_bytes = given.tag_bytes
        if region_bytes is not None:
            check_region_bytes(reader, region_bytes, capacity_bytes, context, tag_bytes)

        def refuse(remedy: str) -> ConfigError:
            return ConfigError(f"{reader.where}: path={shown(options['path'])} {remedy}")

        refuse_bare_mount_point(given.path, context.filesystem, refuse)
        claim = Claim(
            given.path,
            refuse,
            context.engine_pid,
            allow_world_writable=given.allow_world_writable,
            wait_s=context.wait_s,
        )
        try:
            verdict = judge_folder(
                claim.path, capacity_bytes, context.block_bytes, tag_bytes, region_bytes
            )
            check_plan(reader, capacity_bytes, context, tag_bytes, verdict.plan)
            check_memory(reader, capacity_bytes, claim.path, verdict.plan, tag_bytes)
        except NotAFile as problem:
            claim.release()
            raise refuse(not_ours(problem)) from None
        except OSError as problem:
            claim.release()
            raise refuse(unusable(problem, "cannot be read")) from problem
        except ConfigError:
            claim.release()
            raise
        return cls(context, claim, verdict, given)

    @classmethod
    def check_keys(cls, options: Mapping[str, Any], context: BackendContext) -> None:
        """Check the options, and the file of keys that they name."""
        read_options(options, context)

    @classmethod
    def check_options(cls, options: Mapping[str, Any], context: BackendContext) -> str:
        """Check the options, the folder, and whether it is in use."""
        reader, given = read_options(options, context)
        where = f"{reader.where}: path={shown(options['path'])}"
        refuse_folder(given.path, where, allow_world_writable=given.allow_world_writable)
        if context.block_bytes:
            check_new_folder(reader, given, context)
        return os.path.realpath(given.path)

    @classmethod
    def check_connection(cls, options: Mapping[str, Any], context: BackendContext) -> str:
        """Write, read and remove a file in the folder."""
        reader, given = read_options(options, context)
        try:
            return try_folder(given.path)
        except OSError as problem:
            where = f"{reader.where}: path={shown(options['path'])}"
            raise ConfigError(f"{where} {not_working(problem)}") from problem

    @property
    def place(self) -> str:
        """The folder, with links resolved."""
        return os.path.realpath(self._path)

    @property
    def filesystem(self) -> int:
        """The folder's filesystem when it was claimed."""
        return self._filesystem

    async def open(self) -> None:
        """Recover the folder's blocks. Raises ``OSError``; the folder is released then."""
        try:
            await self._threads.run(self._report_doubts)
            self._log = await self._begin(self._verdict, self._plan.capacity_blocks)
        except BaseException as problem:
            self._is_closed = True
            self._threads.stop()
            self._claim.release()
            if isinstance(problem, OSError) and problem.errno in NO_ROOM:
                raise OSError(problem.errno, f"{problem.strerror}: {ROOM}", self._path) from None
            raise
        self._upkeep = asyncio.get_running_loop().create_task(self._keep_up())

    def contents(self) -> Iterable[Sequence[bytes]]:
        """Yield the keys that were recovered, in batches, least recently stored first."""
        if self._log is None:
            return iter(())
        return stored_together(self._log.index, self._log.regions.oldest_first())

    async def probe(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Look up the keys in the index. No I/O."""
        return [self._log is not None and self._log.has(key) for key in keys]

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Read the blocks, neighbours in one transfer."""
        log = self._log
        if log is None:
            return [Loaded(Outcome.ABSENT)] * len(blocks)
        if self._encrypted_log is not None:
            return await log.calls.shielded(self._encrypted_log.load(log, blocks))
        return await log.load(blocks)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        """Append the blocks, usually in one transfer."""
        log = self._log
        if log is None:
            return [Outcome.FAILED] * len(blocks)
        if self._encrypted_log is not None:
            ends = await log.calls.shielded(self._encrypted_log.store(log, blocks))
        else:
            ends = await log.store(blocks)
        # A region may have been reclaimed meanwhile: blocks lost by then are no longer DONE.
        there = log.index.find(block.key for block in blocks)
        return [
            Outcome.FULL if end is Outcome.DONE and location is None else end
            for location, end in zip(there, ends, strict=True)
        ]

    async def remove(self, keys: Sequence[bytes]) -> None:
        """Forget these keys. No I/O: their bytes stay until their region is overwritten."""
        if self._log is not None:
            # Victims come tail first: in reverse order they are found side by side.
            self._log.remove(keys[::-1])

    async def close(self) -> None:
        """Release the folder. Waits at most a second for running calls."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._upkeep is not None:
            self._upkeep.cancel()
        log, self._log = self._log, None
        if log is not None:
            with move_on_after(CLOSE_TIMEOUT_S_MAX):
                await log.calls.wait_idle()
                await self._threads.run(lambda: None)  # queued behind upkeep's last call
            self._devices[-1].close()
        self._threads.stop()
        if self._encrypted_log is not None:
            self._encrypted_log.stop()
        self._release_when_idle()

    def busy_threads(self) -> int:
        """Count the calls that may still touch a buffer, including cancelled and hung ones."""
        encrypting = 0 if self._encrypted_log is None else self._encrypted_log.busy()
        return encrypting + sum(device.busy() for device in self._devices)

    def counters(self) -> Mapping[str, int]:
        """Return counts of writes, losses and recovery cases, and of current blocks and regions."""
        counts = dict(self._counters.counts())
        log = self._log
        if log is not None:
            counts["blocks"] = len(log.index)
            counts["regions_free"] = log.regions.free_count
            counts["regions_retired"] = log.regions.count_in(RegionState.RETIRED)
            counts["capacity_bytes"] = log.regions.count * self._region_bytes
            in_use = log.regions.count - log.regions.free_count
            counts["used_bytes"] = in_use * self._region_bytes
        return counts

    # --- beginning ---

    async def _begin(self, verdict: Verdict, blocks_max: int) -> BlockLog:
        """Open the folder, and keep the newest ``blocks_max`` of its blocks."""
        plan, geometry = verdict.plan, verdict.plan.geometry
        self._region_bytes = geometry.region_bytes
        superblock, counts = await self._threads.run(partial(prepare_folder, self._path, verdict))
        self._superblock = SuperblockCopy(self._claim, superblock)
        open_device = partial(
            FileDevice,
            Segments(self._path, geometry.region_bytes, plan.segment_regions),
            direct=self._direct,
            read_threads=self._io_depth,
            write_threads=self._io_depth,
            name=self._context.tier_name,
            on_direct_refused=partial(self._incidents.report, "store", "direct_refused"),
            on_not_reserved=partial(self._incidents.report, "store", "room_not_reserved"),
        )
        device = await self._threads.run(open_device)
        self._devices = [*(each for each in self._devices if each.busy()), device]
        keyring = None if self._encrypted_log is None else self._encrypted_log.keyring
        key_id = NO_KEY_ID if keyring is None else keyring.current_id
        key_ids = {NO_KEY_ID} if keyring is None else set(keyring.by_id)
        index = BlockIndex(plan.regions, geometry.slots, encrypted=keyring is not None)
        ahead = regions_ahead(plan.regions, geometry.region_bytes)
        regions = Regions(plan.regions, geometry.slots, index.live, ahead_max=ahead)
        namespace, description = namespace_digest(self._context), describe(self._context)
        identity = Identity(superblock.folder_id, namespace, key_id, description)
        expected = Expected(identity.folder_id, identity.namespace, key_ids, geometry)
        bulk = BulkLoad(index, time_s(self._clock()), self._ttl_s)
        recovery = Recovery(device, expected, self._threads, bulk)
        # A folder that starts empty has nothing to read, however large it may become.
        try:
            found = await recovery.run(plan.regions if verdict.superblock else 0, blocks_max)
        except BaseException:
            device.close()
            raise
        foreign_bytes = found.counts.get("region_foreign", 0) * geometry.region_bytes
        tell_of_others(self._context.tier_name, self._path, foreign_bytes)
        regions.recover(found.sequences, found.reuse_last, found.highest, found.key_ids)
        for name, count in (*counts.items(), *found.counts.items()):
            self._counters.add(name, count)
        log_context = LogContext(
            device,
            index,
            regions,
            geometry,
            Budget(credit_bytes_max(plan.regions, geometry.region_bytes)),
            identity,
            self._counters,
            self._incidents,
            self._clock,
        )
        return BlockLog(
            log_context,
            capacity_blocks=plan.capacity_blocks,
            stores_beside_loads=int(self._io_depth * STORES_BESIDE_LOADS_FRACTION),
            ttl_s=self._ttl_s,
            on_lost=self._report_lost,
        )

    def _report_doubts(self) -> None:
        tag_bytes = 0 if self._encrypted_log is None else TAG_BYTES
        found = doubts(self._path, self._capacity_bytes, self._plan, tag_bytes)
        for name, text in found.items():
            self._incidents.report("store", name, text)

    def _report_lost(self, keys: Sequence[bytes]) -> None:
        self.on_lost(keys)

    def _release_when_idle(self) -> None:
        """Release the folder, but not while a hung thread may still write to it."""

        def is_busy() -> bool:
            # Upkeep writes as well, if a purge was requested.
            return self._threads.busy() > 0 or any(device.busy() for device in self._devices)

        if not is_busy():
            self._claim.release()
            return

        def wait_and_release() -> None:
            while is_busy():
                time.sleep(_RELEASE_POLL_S)
            self._claim.release()

        name = f"{self._context.tier_name}-release"
        daemon_thread(wait_and_release, name).start()

    # --- upkeep ---

    async def _keep_up(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.tick()
            except Exception as error:  # noqa: BLE001 - upkeep goes on, whatever one round met
                self._incidents.report("store", "upkeep_failed", error)

    async def tick(self) -> None:
        """Do one round of upkeep: check the folder, revive regions, sweep expired blocks."""
        if self._log is None:
            await self._come_back()
            return
        log = self._log
        try:
            stands = await self._threads.run(self._claim.stands)
        except OSError as problem:  # of the medium, which may recover in a moment
            self._incidents.report("store", "folder_not_seen", problem)
            stands = True
        if not stands:
            self._vanish(log)
            return
        if self._healing is None or self._healing.done():  # it may hang while the rest goes on
            self._healing = log.calls.start(self._heal(log))
        await self._keep_superblock()
        if self._ttl_s:
            await self._sweep(log)
        await answer_requests(log, self._plan.regions, self._path, self._threads)

    async def _keep_superblock(self) -> None:
        """Write the superblock again if it was damaged: the folder is recognized by it."""
        assert self._superblock is not None, "a log without a superblock"
        try:
            if await self._threads.run(self._superblock.restore):
                self._incidents.report("store", "superblock_restored", "it was gone or damaged")
        except OSError as problem:  # the next round tries again
            self._incidents.report("store", "upkeep_failed", problem)

    async def _heal(self, log: BlockLog) -> None:
        try:
            await log.heal()
        except Exception as error:  # noqa: BLE001 - the next round tries again
            self._incidents.report("store", "upkeep_failed", error)

    async def _sweep(self, log: BlockLog) -> None:
        holding = log.regions.oldest_first()
        rounds = max(1.0, self._ttl_s / SWEEPS_PER_TTL / TICK_S)
        for _ in range(int(len(holding) / rounds) + 1 if holding else 0):
            self._swept = (self._swept + 1) % len(holding)
            log.sweep(holding[self._swept])
            await asyncio.sleep(0)

    def _vanish(self, log: BlockLog) -> None:
        """Give up a folder that is gone. Its blocks are lost."""
        self._incidents.report("store", "folder_vanished", FOLDER_GONE)
        self._log = None
        log.abandon()
        self._devices[-1].close()
        self._claim.release()

    def _is_our_place(self) -> bool:
        """Return whether the folder may be used, or created again, where its path leads now.

        On another filesystem, only if its id shows that it is the same folder: a remount may
        change the filesystem's number. If nothing is mounted any more, the blocks would
        fill another disk. Raises ``OSError``.
        """
        if filesystem_of(self._path) == self._filesystem:
            return True
        try:
            assert self._superblock is not None, "a folder vanished that was never opened"
            return read_superblock(self._path).folder_id == self._superblock.folder_id
        except PageRefused:
            return False

    async def _come_back(self) -> None:
        """Try to use the folder again, empty: any blocks in it were reported as lost."""
        with suppress(ConfigError, OSError):
            if not await self._threads.run(self._is_our_place):
                return
            self._claim = await self._threads.run(self._claim.again)
            try:
                self._filesystem = await self._threads.run(partial(filesystem_of, self._path))
                verdict = await self._threads.run(
                    partial(judge_returned_folder, self._path, self._plan)
                )
                self._log = await self._begin(verdict, 0)
            except BaseException:
                self._claim.release()  # or it would block the next round
                raise
            self._counters.add("folder_came_back")
