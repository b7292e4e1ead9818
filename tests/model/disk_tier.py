"""A tier whose backend is the real disk tier, on a simulated disk, one I/O step at a time.

What is real: the driver of a tier cell, ``DiskBackend``, and all below it: the
log, its index, regions, tables and recovery. What is not: the device, the event
loop, the folder's lock. ``DiskTier`` stands where ``FakeDevice`` stands for
other tiers, and keeps what the model knows of the disk: which copies of a key
a tier was given, and which of them may not come back.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from disk_copies import Copies
from stepped_device import SteppedDevice
from stepped_loop import SteppedLoop

from kvtier.plugin_api.backend import BackendContext, Loaded, Namespace, Outcome, block_digest
from kvtier.tier import driver_messages as d
from kvtier.tier.backend_driver import BackendDriver
from kvtier_backends.disk import backend as real
from kvtier_backends.disk.disk_options import DiskOptions
from kvtier_backends.disk.folder.claim import Plan, new_superblock
from kvtier_backends.disk.folder.opening import Verdict
from kvtier_backends.disk.folder.recovery import FOLDER_CASES
from kvtier_backends.disk.format import PAGE_BYTES, make_region_geometry, region_bytes_for
from kvtier_backends.disk.log.regions import WRITE_AMPLIFICATION_MAX
from tests.unit.backends.disk._simulated import SimulatedDisk

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine, Sequence

    from world import DiskShape, World

    from kvtier.core.wire import Message
    from kvtier.plugin_api.backend import LoadBlock, StoreBlock
    from kvtier.plugin_api.keys import Key
    from kvtier_backends.disk.log.block_log import BlockLog
    from tests.support.cell import Batch, TestTier

BLOCK_BYTES = 12 * PAGE_BYTES
"""A block's share of the write budget must pay for a table page, as with real blocks."""

POLL_S = 0.005


def plan_of(shape: DiskShape) -> Plan:
    """Return how the disk is cut."""
    own_page_bytes = shape.own_page_slots * BLOCK_BYTES
    region_bytes = region_bytes_for(shape.slots, BLOCK_BYTES, own_page_bytes=own_page_bytes)
    geometry = make_region_geometry(region_bytes, BLOCK_BYTES, own_page_bytes=own_page_bytes)
    return Plan(geometry, shape.regions, shape.regions)


class _Folder:
    """The claim on a folder that always stands."""

    path = "/"

    def stands(self) -> bool:
        return True

    def is_in(self, _path: str) -> bool:
        """Files at its path are not its own: it has none, and so no superblock to look after."""
        return False

    def release(self) -> None:
        """There is no lock."""


class _NoThreads:
    """Runs at once what the real one runs in a thread."""

    async def run(self, call: Callable[[], Any]) -> Any:
        # `kvtier purge` leaves its requests as files in the folder; here is none.
        asks_for_requests = getattr(getattr(call, "func", None), "__name__", "") == "_pop_request"
        return None if asks_for_requests else call()

    def busy(self) -> int:
        return 0

    def stop(self) -> None:
        """There is no thread."""


class _Tasks:
    """The task group of a cell."""

    def __init__(self, loop: SteppedLoop) -> None:
        self.running: set[asyncio.Task[None]] = set()
        self._loop = loop

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(coroutine)
        self.running.add(task)
        task.add_done_callback(self.running.discard)


class _Watched:
    """Stands between driver and backend, and sees what the driver's own check would hide."""

    def __init__(self, tier: DiskTier, backend: real.DiskBackend) -> None:
        self._tier = tier
        self._backend = backend
        self.traits = backend.traits
        self.contents = backend.contents
        self.busy_threads = backend.busy_threads

    async def probe(self, keys: Sequence[Key]) -> Sequence[bool]:
        return await self._backend.probe(keys)

    async def store(self, blocks: Sequence[StoreBlock]) -> Sequence[Outcome]:
        tier = self._tier
        for key, buffer, _ in blocks:
            if bytes(buffer) not in tier.world.committed[key]:
                tier.wrong.append(f"the tier was given bytes of {key!r} that nobody committed")
        tier.copies.begin(blocks, tier.now)
        outcomes = await self._backend.store(blocks)
        tier.copies.end(blocks)
        return outcomes

    async def remove(self, keys: Sequence[Key]) -> None:
        self._tier.copies.forget(keys)
        await self._backend.remove(keys)

    async def load(self, blocks: Sequence[LoadBlock]) -> Sequence[Loaded]:
        """Check what the log says is DONE, before the driver turns it into a miss."""
        tier = self._tier
        tier.excuse()
        oldest = tier.now - tier.shape.ttl_s - 1 if tier.shape.ttl_s else 0.0
        loaded = await self._backend.load(blocks)
        tier.excuse()
        for (key, buffer), answer in zip(blocks, loaded, strict=True):
            tier.answers[answer.outcome.name] += 1
            if answer.outcome is not Outcome.DONE:
                continue
            if answer.digest not in tier.copies.given.get(key, ()):
                tier.wrong.append(f"{key!r} has a digest that it was never given")
            elif tier.copies.stored_at[key, answer.digest] < oldest:
                tier.wrong.append(f"{key!r} is older than ttl_s and was served")
            is_whole = block_digest(key, buffer) == answer.digest
            if not is_whole and (key, answer.digest) not in tier.excused:
                tier.wrong.append(f"{key!r} was read wrong, and no medium had failed")
        return loaded


class Life:
    """One life of the tier's cell, from its opening until it is killed or fenced."""

    def __init__(self, tier: DiskTier) -> None:
        world = tier.world
        self._tier = tier
        self.loop = SteppedLoop(world.now)
        self.device = SteppedDevice(tier.disk, self.loop)
        self.device.sick = tier.sick
        self.device.has_room = tier.has_room
        context = BackendContext(world.shape.block_bytes, Namespace({}), tier.name)
        verdict = Verdict(tier.plan, tier.superblock, FOLDER_CASES[-1])
        self.backend = real.DiskBackend(
            context,
            _Folder(),
            verdict,
            DiskOptions("/", 0, None, tier.shape.ttl_s, 4, direct=False, encrypted_log=None),
            self.loop.time,
        )
        self.backend._threads = _NoThreads()
        self.driver = BackendDriver(
            tier.name, _Watched(tier, self.backend), world.memory, self._report
        )
        self.tasks = _Tasks(self.loop)
        self.driver.begin(self.tasks)
        self.backend.on_lost = self._lost
        self.is_open = False
        self.since: dict[Key, float] = {}  # when the model first saw a key in the index
        self.is_ending = False  # its cell broke: nothing it says is heard any more
        self._opening = self.loop.create_task(self.backend.open())
        # The device takes the place of files where the backend makes one: before it first waits.
        with (
            patch.object(real, "FileDevice", lambda *_, **__: self.device),
            patch.object(real, "prepare_folder", lambda *_: (tier.superblock, {})),
        ):
            self.run()

    @property
    def log(self) -> BlockLog:
        """The real log, once the backend is open."""
        log = self.backend._log
        assert log is not None
        return log

    def run(self) -> None:
        """Let the coroutines go on until all wait for the device, or for time."""
        self.loop.run()
        if not self.is_open and self._opening.done():
            self._opening.result()
            self.is_open = True
            self._tier.life_opened(self)
            self.loop.run()

    def is_quiet(self) -> bool:
        """Tell whether nothing runs but the upkeep."""
        if self.device.calls or self.tasks.running:
            return False
        return self.is_open and self.log.calls.is_idle()

    def work(self) -> bool:
        """End the oldest call, or let time pass for who waits. False: all is quiet."""
        if self.device.calls:
            self.device.end(self.device.calls[0])
        elif not self.is_quiet():
            self.loop.pass_time(POLL_S)
        else:
            return False
        self.run()
        return True

    def break_down(self) -> None:
        """Cancel what the cell runs. What the log runs goes on until the device is done."""
        self.is_ending = True
        for task in list(self.tasks.running):
            task.cancel()
        if self.backend._upkeep is not None:
            self.backend._upkeep.cancel()
        self.run()

    def _lost(self, keys: Sequence[Key]) -> None:
        if self._tier.life is not self:
            return  # its coroutines are closed by the garbage collector, whenever that comes
        self._tier.copies.forget(keys)
        self.driver.report_lost(keys)

    def _report(self, message: Message) -> None:
        if self.is_ending or self._tier.life is not self:
            return
        held = self._tier.tier
        if isinstance(message, d.BatchEnded):
            self._tier.parts_ended += 1
            batch = next(each for each in held.batches if each.batch == message.batch)
            held.answer(batch, message.outcomes)
        else:
            held.mailbox.post(message)


class DiskTier:
    """One tier's disk, through all lives of its cell."""

    def __init__(self, world: World, tier: TestTier, shape: DiskShape, seed: int = 0) -> None:
        self.world = world
        self.tier = tier
        self.name = tier.name
        self.shape = shape
        self.plan = plan_of(shape)
        geometry = self.plan.geometry
        self.disk = SimulatedDisk(
            shape.regions, geometry.region_bytes, seed, fine_bytes=geometry.slots_at
        )
        self.superblock = new_superblock(self.plan)
        self.sick: set[int] = set()
        self.has_room = True
        self.copies = Copies()
        self.excused: set[tuple[Key, bytes]] = set()  # copies that the disk may have damaged
        self.wrong: list[str] = []
        self.answers: Counter[str] = Counter()
        self.parts_ended = 0
        self.lives = 0
        self.life: Life | None = None
        self.credit_bytes = 2 * geometry.stride + 8 * PAGE_BYTES
        self._before: dict[Key, bytes] | None = {}  # what the last life knew; None: power was lost
        self.begin()
        while not self.is_open:
            self._life.work()

    # --- what is ---

    @property
    def now(self) -> float:
        """The time on the backend's clock."""
        return self._life.loop.time()

    @property
    def is_open(self) -> bool:
        """Tell whether it serves."""
        return self.life is not None and self.life.is_open

    @property
    def blocks(self) -> dict[Key, int]:
        """Where the index has which key."""
        if not self.is_open:
            return {}
        index = self._life.log.index
        found = {}
        for region in range(self.shape.regions):
            for key in index.keys_of(region):
                location = index.get(key)
                assert location is not None, f"{key!r} is in a region, and can't be found"
                found[key] = location
        return found

    @property
    def calls(self) -> list:
        """What the device has been asked for and has not ended."""
        return [] if self.life is None else self.life.device.calls

    def see_blocks(self) -> dict[Key, float]:
        """Return since when the model has seen each key in the index."""
        life = self._life
        life.since = {key: life.since.get(key, self.now) for key in self.blocks}
        return life.since

    def digest_at(self, location: int) -> bytes:
        """Return the digest that the index has for the block at a location."""
        return self._life.log.index.record(location).digest

    def holds_blocks_in(self, region: int) -> bool:
        """Tell whether a region has blocks that the index knows of."""
        return any(self._place(location)[0] == region for location in self.blocks.values())

    def is_whole(self, key: Key, location: int) -> bool:
        """Tell whether the bytes on the disk are those that the index speaks of."""
        region, at = self._place(location)
        data = memoryview(self.disk.bytes[region])[at : at + self.world.shape.block_bytes]
        return block_digest(key, data) == self.digest_at(location)

    def excuse(self) -> None:
        """Note which copies may be damaged: the disk lost sectors of them, or of their headers.

        With an older header a region has an older table, whose blocks may be overwritten.
        Such a copy stays damaged when it is reinserted.
        """
        for key, location in self.blocks.items():
            region, at = self._place(location)
            parts = ((0, PAGE_BYTES), (at, self.world.shape.block_bytes))
            if any(
                (region, sector.start) in self.disk.lost
                for part in parts
                for sector in self.disk.sectors(*part)
            ):
                self.excused.add((key, self.digest_at(location)))

    def is_sound(self, key: Key) -> bool:
        """Tell whether a load would bring the key."""
        location = self.blocks.get(key)
        if location is None or self._place(location)[0] in self.sick:
            return False
        return self._life.log.has(key) and self.is_whole(key, location)

    # --- what the model has it do ---

    def begin(self) -> None:
        """Begin a life: its backend opens the disk, as far as that goes without the device."""
        self.lives += 1
        self.life = None
        life = Life(self)
        self.life = life
        life.run()

    def life_opened(self, life: Life) -> None:
        """Note what was recovered, and judge it."""
        self.life = life
        found = {key: self.digest_at(at) for key, at in self.blocks.items()}
        self._check_recovered(found, life)
        self.copies.restart(found)
        self.excuse()
        # As after a quiet time; else there is hardly ever budget to append blocks again.
        life.log._context.budget.earn(int(self.credit_bytes / (WRITE_AMPLIFICATION_MAX - 1)))
        if self.lives > 1:
            self.world.serve_anew(self.world.devices.index(self))

    def take(self, message: Batch | d.AnnounceContents) -> None:
        """Hand a message to the driver, as the tier's mailbox does."""
        self._life.driver.receive(message)
        self._life.run()

    announce_contents = take

    def move(self, number: int, piece: int) -> None:
        """Move a piece of one of the calls."""
        call = self.calls[number % len(self.calls)]
        if call.left:
            self._life.device.move(call, call.left[piece % len(call.left)])

    def end(self, number: int) -> None:
        """End one of the calls, and let go on who waited for it."""
        life = self._life
        life.device.end(self.calls[number % len(self.calls)])
        life.run()

    def is_at_work(self) -> bool:
        """Tell whether anything goes on but the upkeep."""
        return self.life is not None and not self.life.is_quiet()

    def work(self, only: type[object]) -> bool:
        """Do one more of all that is to be done. False: there is nothing, or not of this kind."""
        return only is object and self.life is not None and self.life.work()

    def pass_time(self, seconds: float) -> None:
        """Let time pass for sleeps and for the upkeep."""
        if self.life is not None:
            self.life.loop.pass_time(seconds)
            self.life.run()

    def set_room(self, *, has_room: bool) -> None:
        """Say whether the disk has room for another region."""
        self.has_room = has_room
        if self.life is not None:
            self.life.device.has_room = has_room

    def damage(self, key: Key) -> None:
        """Flip a byte of a copy."""
        region, at = self._place(self.blocks[key])
        self.disk.rot(region, at)
        self.excuse()

    def break_down(self) -> None:
        """Its cell's actor raised; the device goes on with what it was asked for."""
        self._life.break_down()

    def fence(self) -> None:
        """Wait until the device has nothing to do any more."""
        if self.life is not None:
            while self.life.device.calls:
                self.life.work()
            self.kill()

    def kill(self, seed: int | None = None) -> None:
        """End the life in the middle of whatever it does. ``seed``: power is lost as well."""
        life, self.life = self.life, None
        if life is not None and life.is_open:
            self.life = life
            self._before = {
                key: self.digest_at(at)
                for key, at in self.blocks.items()
                if self._place(at)[0] not in self.sick
            }
            self.life = None
        if seed is not None:
            self.disk.random.seed(seed)
            self.disk.crash()
            self._before = None

    # --- helpers ---

    @property
    def _life(self) -> Life:
        assert self.life is not None
        return self.life

    def _place(self, location: int) -> tuple[int, int]:
        geometry = self.plan.geometry
        region, slot = divmod(location, geometry.slots)
        return region, geometry.slot_at(slot)

    def _check_recovered(self, found: dict[Key, bytes], life: Life) -> None:
        """Without a loss of power, what was in the index is found again, and nothing older."""
        before, self._before = self._before, {}
        if before is None:
            return
        counts = life.backend.counters()
        excused = counts.get("entries_over", 0) + counts.get("entries_expired", 0)
        missing = before.keys() - found.keys()
        if len(missing) > excused and not self.sick:
            self.wrong.append(f"{missing} were not found again after a restart, {excused} may be")
        for key, digest in before.items():
            is_older = found.get(key) in self.copies.gone.get(key, ())
            if key in found and found[key] != digest and is_older and not self.sick:
                self.wrong.append(f"{key!r} came back as an older copy")
