"""Storage of each kind that goes wrong when a test says so."""

from __future__ import annotations

import errno
import os
from base64 import b64decode, b64encode
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from kvtier_backends.disk import DiskBackend
from kvtier_backends.fs import FsBackend
from kvtier_backends.mooncake import MooncakeBackend
from kvtier_backends.redis import RedisBackend
from kvtier_backends.s3 import S3Backend
from tests.support import mooncake_server, redis_servers
from tests.support.fuse_folder import fuse_folder
from tests.support.patience import until
from tests.support.s3_fault_server import Fault, FaultServer, fault_server
from tests.support.s3_server import BUCKET, options_for, set_credentials
from tests.unit.backends._media import fill_with_files, tmpfs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from kvtier.plugin_api.backend import Backend, BackendContext
    from tests.support.fuse_folder import FuseFolder
    from tests.support.redis_servers import Program, RedisServer

    Fails = Callable[[Any], AbstractContextManager[None]]

BLOCK_BYTES = 1 << 18
"""More than a socket gives at once, and than Mooncake's client copies."""


class Record(NamedTuple):
    """What lies in a block's place: the block, and what is behind it or beside it."""

    block: bytes
    trailer: bytes = b""


class Storage:
    """A backend's storage, in which a test may read and replace records."""

    keeps_lengths = False  #: whether a record can't be replaced by a longer or a shorter one
    own_harms: tuple[Callable[[Any, bytes], None], ...] = ()
    """What else may lie there, in this kind of storage alone: given a backend and a key."""

    def __init__(self, kind: type[Backend], **options: Any) -> None:
        self._kind = kind
        self._options = options

    def make(self, context: BackendContext, **more: Any) -> Backend:
        """Make a backend. ``more``: of its options."""
        return self._kind.from_options({**self._options, **more}, context)

    def read(self, backend: Any, key: bytes) -> Record:
        raw = self.get(backend, key)
        return Record(raw[:BLOCK_BYTES], raw[BLOCK_BYTES:])

    def write(self, backend: Any, key: bytes, record: Record) -> None:
        self.remove(backend, key)
        self.put(backend, key, record.block + record.trailer)

    def get(self, backend: Any, key: bytes) -> bytes:
        raise NotImplementedError

    def put(self, backend: Any, key: bytes, raw: bytes) -> None:
        raise NotImplementedError

    def remove(self, backend: Any, key: bytes) -> None:
        raise NotImplementedError


# --- files ---


class Files(Storage):
    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(FsBackend, root_dir=str(root / "kv"), **options)
        self.root = root

    def get(self, backend: Any, key: bytes) -> bytes:
        return self._path(backend, key).read_bytes()

    def put(self, backend: Any, key: bytes, raw: bytes) -> None:
        self._path(backend, key).write_bytes(raw)

    def remove(self, backend: Any, key: bytes) -> None:
        self._path(backend, key).unlink()

    @staticmethod
    def _path(backend: Any, key: bytes) -> Path:
        return Path(backend._files._layout.path(key))

    def assert_nothing_is_unfinished(self) -> None:
        assert not list(self.root.rglob("*.tmp"))


class FilesOnFuse(Files):
    def __init__(self, folder: FuseFolder) -> None:
        super().__init__(folder.path)
        self.folder = folder


@contextmanager
def small_files(folder: Path) -> Iterator[Files]:
    with tmpfs(folder / "small", "8m", inodes=64) as root:
        yield Files(root)


@contextmanager
def files_on_fuse(folder: Path) -> Iterator[FilesOnFuse]:
    with fuse_folder(folder) as mounted:
        yield FilesOnFuse(mounted)


@contextmanager
def no_room(files: Files) -> Iterator[None]:
    filler = files.root / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    yield
    files.assert_nothing_is_unfinished()
    filler.unlink()


@contextmanager
def no_inodes(files: Files) -> Iterator[None]:
    fill_with_files(files.root)
    yield
    files.assert_nothing_is_unfinished()
    for filler in files.root.glob("filler-*"):
        filler.unlink()


@contextmanager
def no_quota(files: Files) -> Iterator[None]:
    used_up = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    with patch.object(os, "pwritev", side_effect=used_up):
        yield
    files.assert_nothing_is_unfinished()


def fails(number: int, *calls: str) -> Fails:
    @contextmanager
    def fails(files: FilesOnFuse) -> Iterator[None]:
        files.folder.fail(*calls, error=number)
        yield
        files.folder.heal()

    return fails


WRITING = ("create", "mkdir", "write", "rename", "unlink", "truncate", "utimens")


class Disk(Storage):
    keeps_lengths = True

    def __init__(self, folder: Path) -> None:
        path = folder / "kv"
        super().__init__(DiskBackend, path=str(path), capacity_bytes=64 << 20, direct=False)
        self._segment = path / "segment-00000.kv"

    def get(self, backend: Any, key: bytes) -> bytes:
        return self._segment.read_bytes()[self._at(backend, key) :][:BLOCK_BYTES]

    def put(self, backend: Any, key: bytes, raw: bytes) -> None:
        with self._segment.open("r+b") as file:
            file.seek(self._at(backend, key))
            file.write(raw)

    def remove(self, backend: Any, key: bytes) -> None:
        """Nothing: what is put lies over it."""

    @staticmethod
    def _at(backend: Any, key: bytes) -> int:
        geometry = backend._plan.geometry
        region, slot = divmod(backend._log.index.get(key), geometry.slots)
        return int(region * geometry.region_bytes + geometry.slot_at(slot))


# --- Redis and Valkey ---


class Redis(Storage):
    def __init__(self, server: RedisServer, folder: Path) -> None:
        super().__init__(RedisBackend, url=server.url)
        self.server = server
        self.folder = folder
        self.own_harms = (self._put_a_list,)

    def get(self, backend: Any, key: bytes) -> bytes:
        return bytes(self.server.ask("GET", backend._description.name_of(key)))

    def put(self, backend: Any, key: bytes, raw: bytes) -> None:
        self.server.ask("SET", backend._description.name_of(key), raw)

    def remove(self, backend: Any, key: bytes) -> None:
        self.server.ask("DEL", backend._description.name_of(key))

    def _put_a_list(self, backend: Any, key: bytes) -> None:
        self.remove(backend, key)
        self.server.ask("RPUSH", backend._description.name_of(key), "a")

    def set(self, name: str, value: str) -> None:
        self.server.ask("CONFIG", "SET", name, value)


@contextmanager
def redis(program: Program, folder: Path) -> Iterator[Redis]:
    settings = ("--enable-protected-configs", "yes")  # else none may say where it saves
    with redis_servers.running(program, folder / "server", *settings) as server:
        yield Redis(server, folder)


def sets(name: str) -> Fails:
    @contextmanager
    def fails(redis: Redis) -> Iterator[None]:
        redis.set(name, "1")
        yield
        redis.set(name, "0")

    return fails


@contextmanager
def is_a_replica(redis: Redis) -> Iterator[None]:
    """Of none that answers; it serves what it has, unless it is told not to."""
    redis.server.ask("REPLICAOF", redis_servers.HOST, 1)
    yield
    redis.server.ask("REPLICAOF", "NO", "ONE")


@contextmanager
def has_lost_its_master(redis: Redis) -> Iterator[None]:
    redis.set("replica-serve-stale-data", "no")
    with is_a_replica(redis):
        yield


@contextmanager
def cannot_save(redis: Redis) -> Iterator[None]:
    gone = redis.folder / "gone"
    gone.mkdir()
    redis.set("dir", str(gone))
    gone.rmdir()
    redis.set("save", "3600 1")
    redis.server.ask("BGSAVE")
    until(lambda: redis.server.ask("INFO", "persistence")["rdb_last_bgsave_status"] == "err")
    yield
    redis.set("stop-writes-on-bgsave-error", "no")


# --- S3 ---


class S3(Storage):
    """Trailers are metadata of objects, the only ones."""

    def __init__(self, server: FaultServer, endpoint: str) -> None:
        set_credentials()
        super().__init__(S3Backend, **options_for(endpoint, "p"))
        self.server = server
        self.own_harms = (self._have_no_trailer, self._have_a_trailer_that_is_no_base64)

    def read(self, backend: Any, key: bytes) -> Record:
        path = self._path(backend, key)
        (trailer,) = self.server.metadata[path].values()
        return Record(self.server.objects[path], b64decode(trailer))

    def write(self, backend: Any, key: bytes, record: Record) -> None:
        path = self._path(backend, key)
        self.server.objects[path] = record.block
        self._set_trailer(path, b64encode(record.trailer).decode())

    def remove(self, backend: Any, key: bytes) -> None:
        del self.server.objects[self._path(backend, key)]

    @staticmethod
    def _path(backend: Any, key: bytes) -> str:
        return f"/{BUCKET}/{backend._name(key)}"

    def _set_trailer(self, path: str, text: str) -> None:
        self.server.metadata[path] = dict.fromkeys(self.server.metadata[path], text)

    def _have_no_trailer(self, backend: Any, key: bytes) -> None:
        self.server.metadata[self._path(backend, key)].clear()

    def _have_a_trailer_that_is_no_base64(self, backend: Any, key: bytes) -> None:
        self._set_trailer(self._path(backend, key), "?")


@contextmanager
def s3(_folder: Path) -> Iterator[S3]:
    with fault_server() as (server, endpoint):
        yield S3(server, endpoint)


def answers(fault: Fault, methods: str = "") -> Fails:
    @contextmanager
    def fails(s3: S3) -> Iterator[None]:
        s3.server.misbehave(fault, methods)
        yield
        s3.server.behave()

    return fails


@contextmanager
def no_puts(s3: S3) -> Iterator[None]:
    """Not of a description either."""
    begin = s3.server.begin

    def denied(method: str, path: str) -> Fault | None:
        return Fault.DENIED if method == "PUT" else begin(method, path)

    with patch.object(s3.server, "begin", denied):
        yield


# --- Mooncake ---


class Mooncake(Storage):
    def __init__(self, cluster: mooncake_server.Cluster, other: Any) -> None:
        super().__init__(MooncakeBackend, master=cluster.address)
        self._other = other

    def get(self, backend: Any, key: bytes) -> bytes:
        return bytes(self._other.get(backend._transfers.name_of(key)))

    def put(self, backend: Any, key: bytes, raw: bytes) -> None:
        name = backend._transfers.name_of(key)
        assert self._other.put(name, raw or b"x") == 0  # it takes nothing that is empty

    def remove(self, backend: Any, key: bytes) -> None:
        assert self._other.remove(backend._transfers.name_of(key), True) == 0


@contextmanager
def mooncake(folder: Path) -> Iterator[Mooncake]:
    with (
        mooncake_server.running(folder) as cluster,
        mooncake_server.other_client(cluster) as other,
    ):
        yield Mooncake(cluster, other)
