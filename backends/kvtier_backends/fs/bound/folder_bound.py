"""Runs both sides of the protocol for one engine's tier, on its event loop.

A folder that is full, fails or hangs affects only stores: they get no room. Nothing else waits.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from kvtier.plugin_api.deadlines import time_left_s
from kvtier.plugin_api.log import log
from kvtier.plugin_api.threads import daemon_thread, start_thread
from kvtier_backends.fs.bound.cleaner import Cleaner
from kvtier_backends.fs.bound.eviction import Evicted, Pace, evict, scan, walk_files
from kvtier_backends.fs.bound.protocol import SPACE, Timing, ensure_folder, locate
from kvtier_backends.fs.bound.removals import RemovalsReader
from kvtier_backends.fs.bound.small_files import DaemonExecutor, SmallFiles
from kvtier_backends.fs.bound.writer import NoGrant, Stage, Writer
from kvtier_backends.fs.layout import VllmLayout
from kvtier_backends.fs.open_root import PlaceLost
from kvtier_backends.fs.temporary import (
    parse_temporary_untrusted,
    parse_writer_untrusted,
    this_writer,
)
from kvtier_backends.posix import NO_ROOM

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from kvtier_backends.fs.bound.account import Scanned
    from kvtier_backends.fs.bound.protocol import Array, Folder
    from kvtier_backends.fs.layout import Layout
    from kvtier_backends.fs.open_root import OpenRoot
    from kvtier_backends.incidents import IncidentLog, TierCounters

ROOM_WAIT_S_MAX: Final = 1.0
"""Longest wait of a store for a grant: the first one takes some rounds to arrive."""

ROUND_ENDS_S_MAX: Final = 0.5
"""Time for a running round to end when the tier is closed."""

_EVICTING_THREADS: Final = 8
_THREADS: Final = 4 + _EVICTING_THREADS
_GRANT_GONE: Final = frozenset({errno.ENOENT, errno.ESTALE})
_MARK_BYTES: Final = 4

Answer = TypeVar("Answer")


class ThreadHands:
    """Evicts and scans in threads, below a root that stays open meanwhile."""

    def __init__(self, executor: DaemonExecutor, timing: Timing, name: str) -> None:
        self.root: SmallFiles | None = None
        self._executor = executor
        self._timing = timing
        self._name = name
        self._found: Scanned | OSError | None = None
        self._scan = 0
        self._evicting: asyncio.Future[list[Evicted]] | None = None
        self._eviction = 0

    def begin_evict(self, victims: Array, *, folders: bool) -> None:
        """Begin to remove these blocks, in several threads: each may wait for storage."""
        root = self._root()
        loop = asyncio.get_running_loop()
        self._eviction += 1
        number, end_s = self._eviction, time.monotonic() + self._timing.evict_s

        def keep_on() -> bool:
            return self._eviction == number and time.monotonic() < end_s

        def work(part: Array) -> Evicted:
            return evict(root.descriptor, part, keep_on, folders=folders)

        parts = (victims[part::_EVICTING_THREADS] for part in range(_EVICTING_THREADS))
        calls = (loop.run_in_executor(self._executor, work, part) for part in parts)
        self._evicting = asyncio.gather(*calls)

    def evicted(self) -> Evicted | None:
        """Return the eviction's result when it has ended, once."""
        if self._evicting is None or not self._evicting.done():
            return None
        done, self._evicting = self._evicting.result(), None
        return Evicted(
            [number for each in done for number in each.numbers],
            [name for each in done for name in each.names],
            sum(each.bytes for each in done),
            next((each.failed for each in done if each.failed is not None), None),
        )

    async def wait_evicted(self) -> None:
        """Wait until no block is being removed. The caller limits the time."""
        if self._evicting is not None:
            await asyncio.wait({self._evicting})

    def begin_scan(self, epoch: int, duty: float) -> None:
        """Begin to scan for all blocks, in a thread of its own."""
        self._scan += 1
        self._found = None
        work = partial(self._run_scan, self._scan, self._root(), epoch, duty)
        try:
            start_thread(daemon_thread(work, f"{self._name}-scan"))
        except OSError as no_thread:
            self._found = no_thread

    def scanned(self) -> Scanned | OSError | None:
        """Return the result of the scan, once."""
        found, self._found = self._found, None
        return found

    def give_up(self) -> None:
        """Stop a running scan and eviction; ``evicted`` soon has the blocks removed by then."""
        self._scan += 1
        self._eviction += 1

    def _run_scan(self, number: int, root: SmallFiles, epoch: int, duty: float) -> None:
        found: Scanned | OSError
        pace = Pace(duty)

        def keep_on() -> bool:
            pace.rest()
            return self._scan == number

        try:
            files = walk_files(root.descriptor, "", 0, keep_on)
            found = scan(files, epoch, self._timing.epoch_s)
        except OSError as problem:
            found = problem
        except Exception as problem:  # noqa: BLE001 - or the scan would never be over
            found = OSError(errno.EIO, repr(problem))
        if self._scan == number:
            self._found = found

    def _root(self) -> SmallFiles:
        if self.root is None:
            raise FileNotFoundError(errno.ENOENT, "the folder is not open")
        return self.root


class FolderBound:
    """Keeps one tier's folder within its capacity, together with all its other users.

    Any thread may call ``stage`` and the notes, only the loop's thread everything else.
    """

    def __init__(  # noqa: PLR0913 - what it stands between
        self,
        layout: Layout,
        file_bytes: int,
        capacity: int,
        current_place: Callable[[], OpenRoot],
        on_removed: Callable[[Sequence[str]], Awaitable[None]],
        counters: TierCounters,
        incidents: IncidentLog,
        *,
        tier_name: str,
        timing: Timing | None = None,
    ) -> None:
        """``on_removed``: receives the names of evicted block files, as in the layout."""
        self._timing = timing or Timing()
        self._blocks_name = layout.blocks_name
        self._file_bytes = file_bytes
        self._capacity = capacity
        self._current_place = current_place
        self._on_removed = on_removed
        self._counters = counters
        self._incidents = incidents
        self._folder_mode = layout.folder_mode
        self._tier_name = tier_name
        self._executor = DaemonExecutor(_THREADS, f"{tier_name}-space")
        self._hands = ThreadHands(self._executor, self._timing, tier_name)
        self._me = this_writer()
        name = f"{self._me}-{secrets.token_hex(_MARK_BYTES)}"
        self._writer = Writer(name, file_bytes, self._timing, time.monotonic)
        self.cleaner = Cleaner(
            name,
            capacity,
            self._hands,
            self._timing,
            time.monotonic,
            self._is_gone,
            others_store=isinstance(layout, VllmLayout),
        )
        self._removals = RemovalsReader()
        self._read_s = float("-inf")
        self._place: OpenRoot | None = None
        self._space: Folder | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake: asyncio.Event | None = None
        self._is_stopping = False
        self._round_ended: asyncio.Condition | None = None
        self._warned_of: int | None = None
        self._tidied = 0  #: the last term that was tidied

    # --- any thread ---

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Yield the open folder in which a block's file is to be written, before it is renamed.

        Raises ``NoGrant`` if nothing may be stored right now, ``OSError`` if this block never may.
        """
        location = locate(self._blocks_name, name)
        if location is None:
            raise OSError(errno.EINVAL, "no bound can count a block of this name", name)
        grants = self._writer.grants
        grant = grants.begin(self._file_bytes)
        stage = Stage(grant.folder.descriptor)
        try:
            yield stage
        except BaseException as problem:
            is_gone = isinstance(problem, OSError) and problem.errno in _GRANT_GONE
            if is_gone and _is_removed(stage.folder):
                grants.lose(grant)
                raise NoGrant from problem
            if stage.size is not None:
                grants.end(grant, location, stage.size, self._file_bytes - stage.size)
            else:
                grants.give_up(grant, 0 if stage.is_left else self._file_bytes)
            raise
        size = self._file_bytes if stage.size is None else stage.size
        grants.end(grant, location, size, self._file_bytes - size)

    def note_no_room(self) -> None:
        """Note that the filesystem, or a quota, had no room for a block with a grant."""
        self._writer.grants.note_no_room()

    def note_use(self, name: str) -> None:
        """Note that a block was loaded, or found to be there."""
        location = locate(self._blocks_name, name)
        if location is not None:
            self._writer.uses.note(location)

    # --- the loop's thread ---

    def start(self) -> None:
        """Start taking part in the protocol."""
        self._wake = asyncio.Event()
        self._round_ended = asyncio.Condition()
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def wait_for_room(self, blocks: int) -> bool:
        """Request room for this many blocks; wait for one's, for half of a store's time at most."""
        grants = self._writer.grants
        if self._round_ended is None or self._wake is None:
            return False
        with suppress(TimeoutError):
            async with (
                asyncio.timeout(min(ROOM_WAIT_S_MAX, time_left_s() / 2)),
                self._round_ended,
            ):
                while not grants.left(self._file_bytes):
                    grants.ask(blocks * self._file_bytes)  # a round uses it up
                    self._wake.set()
                    await self._round_ended.wait()
        return grants.left(self._file_bytes) > 0

    async def stop(self) -> None:
        """Stop taking part: hand back all grants. The caller limits the time."""
        self._is_stopping = True
        if self._task is not None and self._wake is not None:
            self._wake.set()
            # A cancelled call may leave a file open: let the round end, if it does soon.
            await asyncio.wait({self._task}, timeout=ROUND_ENDS_S_MAX)
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._hands.give_up()
        with suppress(OSError):
            if self._space is not None:
                await self._hands.wait_evicted()
                await self._writer.sign_off()
                await self.cleaner.release(self._space)

    def discard(self) -> None:
        """Stop taking part, and let the threads end. Never waits."""
        if self._task is not None:
            self._task.cancel()
        self._hands.give_up()
        self._executor.shutdown()

    def gauges(self) -> dict[str, int]:
        """Return the capacity; from the cleaner also the folder's bytes and blocks."""
        account, capacity = self.cleaner.account, {"capacity_bytes": self._capacity}
        if not self.cleaner.leads or not account.is_counted:
            return capacity
        return {
            **capacity,
            "used_bytes": account.manifest.bytes + account.others,
            "folder_blocks": len(account.manifest),
        }

    async def _run(self) -> None:
        assert self._wake is not None, "started on a loop"
        assert self._round_ended is not None, "started on a loop"
        while not self._is_stopping:
            self._wake.clear()
            is_busy = False
            try:
                async with asyncio.timeout(self._timing.hang_s):
                    is_busy = await self._round()
            except TimeoutError:
                problem = f"no answer within {self._timing.hang_s:g} s"
                self._incidents.report("store", "space_failed", problem)
            except OSError as problem:
                self._incidents.report("store", "space_failed", problem)
            except Exception as problem:  # noqa: BLE001 - stores would get no room for ever
                self.cleaner.step_down()
                self._incidents.report("store", "space_failed", repr(problem))
            async with self._round_ended:
                self._round_ended.notify_all()
            if self._is_stopping:
                return
            pause_s = self._timing.busy_s if is_busy else self._timing.idle_s
            await asyncio.sleep(self._timing.busy_s)  # limits the rate of rounds, whatever wakes it
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, pause_s - self._timing.busy_s)):
                    await self._wake.wait()

    async def _round(self) -> bool:
        """Do one round of both sides. Raises ``OSError``."""
        space = await self._open_space()
        before = self.cleaner.evicted_blocks
        try:
            is_behind = await self.cleaner.round(space)
        finally:
            if self.cleaner.evicted_blocks > before:
                self._counters.add("blocks_evicted", self.cleaner.evicted_blocks - before)
        failure = self.cleaner.pop_failure()
        if failure is not None:
            self._incidents.report("store", "evictions_failed", failure)
        self._warn_of_another(self.cleaner.leads_beside)
        if self.cleaner.leads and self.cleaner.number != self._tidied:
            await _tidy(space)
            self._tidied = self.cleaner.number
        is_storing = await self._writer.round(space)
        await self._read_removals(space)
        return is_behind or is_storing

    def _warn_of_another(self, capacity: int | None) -> None:
        if capacity is not None and capacity != self._warned_of:
            log.warning(
                "fs tier: the engine that cleans the folder has a different capacity_bytes, which "
                "applies; set the same on all engines",
                tier=self._tier_name,
                here=self._capacity,
                there=capacity,
            )
        self._warned_of = capacity

    async def _open_space(self) -> Folder:
        """Open the protocol's folder; reopen it if the root has changed. Raises ``OSError``."""
        loop = asyncio.get_running_loop()
        try:
            place = await loop.run_in_executor(self._executor, self._current_place)
        except PlaceLost:
            self._leave()
            raise
        space = self._space
        is_gone = space is not None and await loop.run_in_executor(
            self._executor, _is_removed, space.descriptor
        )
        if place is not self._place or is_gone:
            self._leave()
            self._hands.root = SmallFiles(os.dup(place.root), self._executor, self._folder_mode)
            self._place = place
        if self._space is None:
            assert self._hands.root is not None, "opened with the place"
            try:
                self._space = await ensure_folder(self._hands.root, SPACE)
            except OSError as problem:
                if problem.errno in NO_ROOM:
                    await self.cleaner.make_room(None)
                raise
        return self._space

    def _leave(self) -> None:
        """Release all folders: an open one keeps a filesystem from being detached."""
        self._hands.give_up()
        self._hands.root = None
        self.cleaner.step_down()
        self._writer.leave()
        self._place = self._space = None

    async def _read_removals(self, space: Folder) -> None:
        if time.monotonic() - self._read_s < self._timing.idle_s:
            return
        self._read_s = time.monotonic()
        start = f"{self._blocks_name}/"
        removed = await self._removals.new(space)
        ours = [name.removeprefix(start) for name in removed if name.startswith(start)]
        if ours:
            await self._on_removed(ours)

    def _is_gone(self, name: str) -> bool:
        """Return whether a writer's process is known to have ended; it must be on this machine."""
        writer = parse_writer_untrusted(name.rpartition("-")[0])
        return writer is not None and writer.is_dead(self._me, 0.0)


async def _tidy(space: Folder) -> None:
    """Remove unfinished manifests of cleaners that were killed or no longer lead."""
    for name in await space.names():
        if parse_temporary_untrusted(name) is not None:
            with suppress(FileNotFoundError):
                await space.remove(name)


def _is_removed(folder: int) -> bool:
    """Return whether an open folder no longer exists. Touches storage."""
    try:
        return os.fstat(folder).st_nlink == 0
    except OSError:
        return True
