"""A folder in memory, and engines over it that take one step at a time, in any order.

A step ends where the real code would wait for the filesystem, so an engine can be stopped or
killed between any two calls. What a client has listed it may be given again later, as long as it
has changed nothing there itself, as NFS does. Clocks are an hour apart.
"""

from __future__ import annotations

import errno
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtier_backends.fs.bound.account import Scanned
from kvtier_backends.fs.bound.cleaner import Cleaner
from kvtier_backends.fs.bound.eviction import Evicted
from kvtier_backends.fs.bound.protocol import KNOWN, Array, Folder, Location, Timing
from kvtier_backends.fs.bound.writer import Grant, NoGrant, Writer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from random import Random

FILE_BYTES = 10
LEAVES = 3
STALE = 0.2  # of listings, where they may be
SLOW_STEPS = 200  # of an eviction whose storage answers late
HOUR_S = 3600.0
TIMING = Timing()


@types.coroutine
def switch() -> Generator[None, None, None]:
    yield


@dataclass(eq=False)
class Node:
    """A folder as the server has it."""

    folders: dict[str, Node] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    is_gone: bool = False

    def check(self) -> None:
        if self.is_gone:
            raise FileNotFoundError("the folder itself")


class SimFolder(Folder):
    """A client's view of a folder."""

    def __init__(self, node: Node, client: Engine) -> None:
        self.descriptor = -1
        self.node = node
        self.client = client

    async def names(self) -> list[str]:
        await switch()
        cached = self.client.listed.get(self.node)
        if cached is None or self.client.world.chance.random() >= STALE:
            self.node.check()
            cached = self.client.listed[self.node] = [*self.node.folders, *self.node.files]
        await switch()
        return list(cached)

    async def read(self, name: str) -> bytes:
        await switch()
        self.node.check()
        if name not in self.node.files:
            raise FileNotFoundError(name)
        content = self.node.files[name]
        await switch()
        return content

    async def write(self, name: str, data: bytes) -> None:
        await switch()
        self.node.check()
        self.client.world.check_room()
        self.node.files[name] = data
        self._changed()
        await switch()

    async def make_folder(self, name: str) -> SimFolder:
        await switch()
        self.node.check()
        if name in self.node.folders:
            raise FileExistsError(name)
        self.client.world.check_room()
        self.node.folders[name] = Node()
        self._changed()
        return await self.open_folder(name)

    async def open_folder(self, name: str) -> SimFolder:
        await switch()
        self.node.check()
        if name not in self.node.folders:
            raise FileNotFoundError(name)
        return SimFolder(self.node.folders[name], self.client)

    async def remove(self, name: str) -> None:
        await switch()
        self.node.check()
        if name in self.node.folders:
            raise IsADirectoryError(name)
        if self.node.files.pop(name, None) is None:
            raise FileNotFoundError(name)
        self._changed()

    async def remove_folder(self, name: str) -> None:
        await switch()
        self.node.check()
        node = self.node.folders.get(name)
        if node is None:
            raise FileNotFoundError(name)
        if node.files or node.folders:
            raise OSError("not empty")
        node.is_gone = True
        del self.node.folders[name]
        self._changed()
        await switch()

    def _changed(self) -> None:
        self.client.listed.pop(self.node, None)


class World:
    """The server, and the time."""

    def __init__(self, chance: Random, capacity: int, pause_s: float, full: float = 0.0) -> None:
        self.full = full  #: how often nothing new can be written
        self.pause_s = pause_s  #: at most, after each turn of an engine
        self.chance = chance
        self.capacity = capacity
        self.time = 0.0
        self.space = Node()
        self.leaves: list[set[int]] = [set() for _ in range(LEAVES)]
        self.started = 0

    def check_room(self) -> None:
        if self.full and self.chance.random() < self.full:
            raise OSError(errno.ENOSPC, "the filesystem is full")

    def blocks(self) -> int:
        return sum(map(len, self.leaves))

    def bytes(self) -> int:
        return FILE_BYTES * (self.blocks() + _unfinished(self.space))


def _unfinished(node: Node) -> int:
    own = sum(name.endswith(".tmp") for name in node.files)
    return own + sum(map(_unfinished, node.folders.values()))


class SimHands:
    """Evicts and scans, step by step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._found: Scanned | None = None
        self._evicted: Evicted | None = None

    def begin_evict(self, victims: Array, *, folders: bool) -> None:
        self._evicted = None
        eviction = self.engine.tasks["evict"] = self._evict(victims)
        eviction.send(None)

    def evicted(self) -> Evicted | None:
        evicted, self._evicted = self._evicted, None
        return evicted

    async def _evict(self, victims: Array) -> None:
        evicted = Evicted()
        for victim in victims:
            await switch()
            leaf = self.engine.world.leaves[int(victim["leaf"])]
            number = int(victim["block"])
            if number in leaf:
                leaf.remove(number)
                evicted.bytes += FILE_BYTES
                evicted.names.append(str(number))
            evicted.numbers.append(number)
        for _ in range(self.engine.world.chance.choice((0, SLOW_STEPS))):
            await switch()
        self._evicted = evicted

    def begin_scan(self, epoch: int, _duty: float) -> None:
        self._found = None
        scan = self.engine.tasks["scan"] = self._scan(epoch)
        scan.send(None)

    def scanned(self) -> Scanned | None:
        found, self._found = self._found, None
        return found

    async def _scan(self, epoch: int) -> None:
        found = []
        for number, leaf in enumerate(self.engine.world.leaves):
            await switch()
            found += [(block, number, FILE_BYTES, max(0, epoch - 1)) for block in leaf]
        await switch()
        self._found = Scanned(np.array(found, KNOWN), 0)


class Engine:
    """One engine: its rounds, its stores, and what it has listed."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.started += 1
        self.name = f"{world.started:012x}-1-1-{world.started:08x}"
        self.offset_s = HOUR_S * world.started
        self.listed: dict[Node, list[str]] = {}
        self.writer = Writer(self.name, FILE_BYTES, TIMING, self.now)
        self.cleaner = Cleaner(
            self.name, world.capacity, SimHands(self), TIMING, self.now, lambda _name: False
        )
        self.space = SimFolder(world.space, self)
        self.stored = 0
        self.tasks: dict[str, Coroutine[Any, Any, None]] = {}
        self.work: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "rounds": self._rounds,
            "store": self._store,
            "another store": self._store,
        }
        self.unfinished = 0

    def now(self) -> float:
        return self.world.time + self.offset_s

    def step(self) -> None:
        """Go on with one of its tasks until it would wait."""
        name = self.world.chance.choice([*{**self.work, **self.tasks}])
        task = self.tasks.get(name)
        if task is None:
            task = self.tasks[name] = self.work[name]()
        try:
            task.send(None)
        except StopIteration:
            del self.tasks[name]

    async def _rounds(self) -> None:
        for each in (self.cleaner.round, self.writer.round):
            try:
                await each(self.space)
            except OSError:
                continue

    async def _store(self) -> None:
        await switch()
        try:
            grant = self.writer.grants.begin(FILE_BYTES)
        except NoGrant:
            return
        await self._put(grant, self.world.chance.randrange(3 * self.world.capacity // FILE_BYTES))

    async def _put(self, grant: Grant, number: int) -> None:
        assert isinstance(grant.folder, SimFolder)
        node = grant.folder.node
        self.unfinished += 1
        temporary = f"{self.unfinished}.tmp"
        await switch()
        if node.is_gone:
            self.writer.grants.lose(grant)
            return
        try:
            self.world.check_room()
        except OSError:
            self.writer.grants.note_no_room()
            self.writer.grants.give_up(grant, FILE_BYTES)
            return
        node.files[temporary] = b""
        await switch()
        leaf = number % LEAVES
        if node.files.pop(temporary, None) is not None:
            self.world.leaves[leaf].add(number)
            self.stored += 1
        await switch()
        self.writer.grants.end(grant, Location(number, leaf), FILE_BYTES, 0)
