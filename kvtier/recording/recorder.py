"""Writes one line per request to a compressed file, without making the scheduler wait.

The scheduler's thread appends one small tuple per request to a bounded queue. A daemon thread
encodes the queue, compresses it to one zstd frame, and appends that to the file: each frame begins
with the header line, so files can be cut or joined at any frame. A full queue, or a
medium that fails or hangs, drops records: they are counted, and that is logged once.

The file is opened again for each frame, about once a second, since the last one may have been moved
away. A frame that was written only in part is cut off again, since nothing behind it could be read.
Two engines would cut off each other's frames, and move each other's files away, so the file at the
path is locked for as long as an engine records to it.

Keys are hashes of a whole prefix; the file has their first 64 bits. It has no tokens and no text.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections import Counter, deque
from struct import unpack
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from kvtier.errors import ConfigError
from kvtier.plugin_api.extras import install
from kvtier.plugin_api.log import log
from kvtier.plugin_api.threads import daemon_thread

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import zstandard

VERSION: Final = 1
REQUESTS_QUEUED_MAX: Final = 4096
KEYS_QUEUED_MAX: Final = 500_000  #: of queued requests; they are held until they are written
FRAME_BYTES: Final = 1 << 20  #: before compression; a frame ends with the line that reaches it
WRITE_S: Final = 1.0
LEVEL: Final = 3
FILE_MODE: Final = 0o600
ID_BYTES: Final = 8
_NOT_REGULAR: Final = "it is not a regular file"

EventKind = Literal["reset", "tier_down", "tier_up"]
TierWork = Literal["loads", "stores"]


class Record(NamedTuple):
    """One request that has ended. Times in seconds since 1970."""

    arrived_s: float
    started_s: float | None  #: when it first loaded or ran; None: it never did
    ended_s: float
    tokens: int
    output_tokens: int
    gpu_tokens: int  #: found in the engine's own prefix cache
    loaded: Sequence[bytes]  #: keys whose blocks the GPU loaded
    sources: Mapping[bytes, int]  #: their secondary tiers; others are from the primary
    keys: Iterable[bytes]  #: of the prompt, head to tail; more may follow


class Happened(NamedTuple):
    """An event that changes the hits of requests."""

    at_s: float  #: since 1970
    kind: EventKind
    tier: int | None = None  #: number of a secondary tier; None for a reset
    work: TierWork | None = None  #: the work that the tier stops doing, or does again


def check_record(path: str) -> None:
    """Raise the ``ConfigError`` that ``Recorder`` would raise for this path, and create nothing.

    Does not check whether another engine writes the file.
    """
    _compressor(path)
    folder = os.path.dirname(path) or "."  # noqa: PTH120 - the path is a str
    try:
        os.stat(f"{folder}/.")  # noqa: PTH116 - a str
        is_there = os.path.lexists(path)
        is_regular = not is_there or stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116
    except OSError as error:
        raise _unwritable(path, error) from error
    if not is_regular:
        raise _unwritable(path, OSError(None, _NOT_REGULAR))
    if not os.access(path if is_there else folder, os.W_OK):
        raise _unwritable(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _compressor(path: str) -> zstandard.ZstdCompressor:
    try:
        import zstandard  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError(
            f"record={path!r} needs the zstandard library. {install('compression')}"
        ) from None
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)


def _unwritable(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"record={path!r} cannot be written: {error.strerror or error}. Make its folder, "
        "change who may write there, or choose another path."
    )


class Recorder:
    """Records one engine's requests. ``add`` only queues: a thread encodes and writes."""

    def __init__(
        self, path: str, bytes_max: int, *, block_tokens: int, tiers: Sequence[str]
    ) -> None:
        """Check that the file can be written, else raise ``ConfigError``.

        ``bytes_max``: of the file and its predecessor together. ``tiers``: names, the primary
        tier's first.
        """
        self._compressor = _compressor(path)
        self._path = path
        self._file_bytes_max = bytes_max // 2
        self._block_tokens = block_tokens
        self._tiers = tiers
        self._header = msgspec.json.encode({"kvtier_record": VERSION, "block_tokens": block_tokens})
        self._queue: deque[tuple[Record | Happened, int]] = deque()
        self._keys_added = self._keys_taken = 0  # each written by one thread
        self._dropped_full = self._dropped_failed = 0  # likewise
        self._said_full = self._said_failed = False
        self._stops = threading.Event()
        self._thread = daemon_thread(self._run, "kvtier-recorder")
        self._lock: int | None = None  #: a descriptor of the file that is locked
        try:
            os.close(self._open())
        except BlockingIOError:
            raise ConfigError(
                f"record={path!r} is written by another engine. Give each engine its own file: "
                "write {dp_rank} into its name, or choose another path."
            ) from None
        except OSError as error:
            raise _unwritable(path, error) from error

    @property
    def dropped(self) -> int:
        """The number of requests that were not recorded."""
        return self._dropped_full + self._dropped_failed

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread.start()

    def add(self, record: Record | Happened, key_count: int = 0) -> None:
        """Queue a request's record, or drop it if the queue is full. Scheduler's thread."""
        queued_keys = self._keys_added - self._keys_taken
        if len(self._queue) >= REQUESTS_QUEUED_MAX or queued_keys > KEYS_QUEUED_MAX:
            self._dropped_full += 1
            if not self._said_full:
                self._said_full = True
                log.warning(
                    "requests are not recorded: writing the record is too slow (logged once)"
                )
            return
        self._keys_added += key_count
        self._queue.append((record, key_count))

    def begin_to_close(self) -> None:
        """Write the queue now. Returns at once; nothing may be added any more."""
        self._stops.set()

    def close(self, timeout_s: float) -> None:
        """Wait until the queue is written, for ``timeout_s`` at most, as the medium may hang."""
        self.begin_to_close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if not self._thread.is_alive() and self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- the recorder's own thread ---

    def _run(self) -> None:
        while True:
            is_last = self._stops.wait(WRITE_S)
            while self._queue:
                self._write_frame()
            if is_last:
                return

    def _write_frame(self) -> None:
        lines = [self._header]
        size = 0
        while self._queue and size < FRAME_BYTES:
            record, key_count = self._queue.popleft()
            self._keys_taken += key_count
            try:
                line = self._line(record)
            except Exception as error:  # noqa: BLE001 - one odd request must not end the record
                self._drop(1, "a request cannot be written", repr(error))
                continue
            lines.append(line)
            size += len(line)
            time.sleep(0)  # the scheduler's thread may want the GIL
        if len(lines) == 1:
            return
        frame = self._compressor.compress(b"\n".join([*lines, b""]))
        try:
            self._append(frame)
        except OSError as error:
            reason = error.strerror or str(error)
            self._drop(len(lines) - 1, "the file cannot be written", reason)

    def _drop(self, count: int, what: str, error: str) -> None:
        self._dropped_failed += count
        if not self._said_failed:
            self._said_failed = True
            event = f"requests are not recorded: {what} (logged once)"
            log.warning(event, path=self._path, error=error)

    def _line(self, record: Record | Happened) -> bytes:
        if isinstance(record, Happened):
            event: dict[str, Any] = {"event": record.kind, "time_s": round(record.at_s, 6)}
            if record.tier is not None:
                event |= {"tier": self._tiers[record.tier + 1], "work": record.work}
            return msgspec.json.encode(event)
        full = record.tokens // self._block_tokens
        ids = [key[:ID_BYTES] for _, key in zip(range(full), record.keys, strict=False)]
        tiers, sources = self._tiers, record.sources
        loaded = Counter(tiers[sources.get(key, -1) + 1] for key in record.loaded)
        loaded_tokens = {tier: n * self._block_tokens for tier, n in loaded.items()}
        if record.loaded:  # the GPU may have had a part of the first one
            first = tiers[sources.get(record.loaded[0], -1) + 1]
            loaded_tokens[first] -= record.gpu_tokens % self._block_tokens
        line: dict[str, Any] = {
            "time_s": round(record.arrived_s, 6),
            "started_s": None if record.started_s is None else round(record.started_s, 6),
            "ended_s": round(record.ended_s, 6),
            "tokens": record.tokens,
            "output_tokens": record.output_tokens,
            "gpu_tokens": record.gpu_tokens,
            "loaded_tokens": loaded_tokens,
            "computed_tokens": record.tokens - record.gpu_tokens - sum(loaded_tokens.values()),
            "blocks": unpack(f"<{len(ids)}Q", b"".join(ids)),
        }
        return msgspec.json.encode(line)

    def _append(self, frame: bytes) -> None:
        """Append a frame, whole or not at all. Raises ``OSError``."""
        if len(frame) > self._file_bytes_max:
            raise OSError(errno.EFBIG, "a request takes more than half of record_bytes_max")
        descriptor = self._open()
        try:
            size = os.fstat(descriptor).st_size
            if size and size + len(frame) > self._file_bytes_max:
                os.replace(self._path, f"{self._path}.1")  # noqa: PTH105 - a str
                os.close(descriptor)
                descriptor = -1
                descriptor, size = self._open(), 0
            try:
                written = 0
                while written < len(frame):
                    written += os.write(descriptor, frame[written:])
            except OSError:
                os.ftruncate(descriptor, size)
                raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _open(self) -> int:
        """Open the file at the path, and lock it. Raises ``OSError``."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self._path, flags, FILE_MODE)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(None, _NOT_REGULAR)
        try:
            os.fchmod(descriptor, FILE_MODE)
            self._lock_file(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _lock_file(self, descriptor: int) -> None:
        """Lock the file, unless it is already locked here. Closing its descriptor unlocks it."""
        if self._lock is not None:
            if os.path.sameopenfile(self._lock, descriptor):
                return
            os.close(self._lock)
            self._lock = None
        lock = os.dup(descriptor)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise
        except OSError:
            pass  # this filesystem has no locks
        self._lock = lock
