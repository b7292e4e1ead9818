"""Passes requests of ``kvtier purge`` to the engine that uses a folder, by two small files.

The command writes ``purge-ID.json`` to the folder. The tier looks for such files
once a second, removes the file, does the purge, and writes ``purged-ID.json``. A
request that was not accepted in time is void, and is answered as well. Both
files are for one user alone and are written whole; neither side trusts their contents.
"""

from __future__ import annotations

import math
import os
import re
import stat
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import msgspec

from kvtier.errors import ConfigError, StoreFault
from kvtier.plugin_api.atomic_file import write_whole
from kvtier_backends.disk.offline.inspection import Folder, user_of
from kvtier_backends.disk.offline.purging import Purged, RegionSelection, purge_log
from kvtier_backends.posix import clock_ahead_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvtier.plugin_api.threads import DaemonThreads
    from kvtier_backends.disk.log.block_log import BlockLog

ACCEPTED_WITHIN_S_MAX: Final = 15.0
DONE_WITHIN_S_MAX: Final = 600.0
"""Time after which no reply is expected any more: the disk may have no room for it."""

LEFT_FOR_S_MAX: Final = 600.0
"""Time after which an unread reply is removed."""

_VOID: Final = "the request came too late, or is another version's. Try again"
_POLL_S: Final = 0.05
_FILE_BYTES_MAX: Final = 1 << 16
_REQUEST: Final = re.compile(r"purge-([0-9a-f]{32})\.json")
_ANSWER: Final = re.compile(r"purged-([0-9a-f]{32})\.json")
_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class _Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    before_s: _Count  #: see ``RegionSelection``
    namespace: _Digest | None
    all_of_it: bool
    until_s: _Count  #: void after that


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    removed: list[tuple[_Digest, _Digest, _Count, _Count]]  #: a kind, and its blocks
    regions_failed: _Count
    error: str


_T = TypeVar("_T", _Request, _Answer)


class NotAnswered(StoreFault):
    """Raised when the engine did not carry out a request. The text has the remedy."""


# --- the command's side ---


def ask_engine(
    path: str, selection: RegionSelection, waiting: Callable[[], None]
) -> tuple[list[tuple[bytes, bytes, int, int]], int] | None:
    """Have the engine that uses the folder remove the selected blocks, and wait for it.

    Returns (namespace, key id, block bytes, blocks) per kind, and how many regions
    could not be changed; None if the engine released the folder without an answer.
    Raises ``NotAnswered``, and ``Misuse`` if nothing can be written there.
    ``waiting`` is called at each poll.
    """
    mark = os.urandom(16).hex()
    request, answer = f"{path}/purge-{mark}.json", f"{path}/purged-{mark}.json"
    until_s = time.time() + ACCEPTED_WITHIN_S_MAX  # for the engine, which is on this host
    end_s = time.monotonic() + ACCEPTED_WITHIN_S_MAX  # for this process: a clock may be set
    namespace = None if selection.namespace is None else selection.namespace.hex()
    asked = _Request(selection.before_s, namespace, selection.all_of_it, max(0, math.ceil(until_s)))
    try:
        _write(request, asked)
        while True:
            used = user_of(path) is not None  # before looking for an answer
            is_there = os.path.lexists(answer)
            found = _read_untrusted(answer, _Answer)
            if found is not None:
                return _rows_of(found)
            if is_there:  # whole, since it is renamed into place, but damaged
                raise NotAnswered(
                    f"{path}: the answer of {user_of(path)} is damaged. kvtier ls shows what "
                    "remains."
                )
            if not used:
                return None
            if os.path.lexists(request) and time.monotonic() > end_s:
                raise NotAnswered(
                    f"{path}: {user_of(path)} did not accept the request in "
                    f"{ACCEPTED_WITHIN_S_MAX:.0f} s. It hangs, or its kvtier is older than this "
                    "one: stop it, and run this again."
                )
            if time.monotonic() > end_s + DONE_WITHIN_S_MAX:
                raise NotAnswered(
                    f"{path}: {user_of(path)} accepted the request and has not reported in "
                    f"{DONE_WITHIN_S_MAX:.0f} s what it did. kvtier ls shows what remains."
                )
            waiting()
            time.sleep(_POLL_S)
    finally:
        for name in (request, answer):
            with suppress(OSError):
                os.unlink(name)


def _rows_of(answer: _Answer) -> tuple[list[tuple[bytes, bytes, int, int]], int]:
    if answer.error:
        raise NotAnswered(f"the engine refused: {answer.error}.")
    rows = [
        (bytes.fromhex(namespace), bytes.fromhex(key_id), block_bytes, blocks)
        for namespace, key_id, block_bytes, blocks in answer.removed
    ]
    return rows, answer.regions_failed


# --- the engine's side ---


async def answer_requests(log: BlockLog, regions: int, path: str, threads: DaemonThreads) -> None:
    """Carry out the requests in the folder. Raises ``OSError``, ``Misuse``."""
    while (popped := await threads.run(partial(_pop_request, path))) is not None:
        mark, asked = popped
        purged, error = Purged(), _VOID
        if asked is not None:
            selection = RegionSelection(
                asked.before_s,
                None if asked.namespace is None else bytes.fromhex(asked.namespace),
                asked.all_of_it,
            )
            try:
                folder = await threads.run(partial(Folder, path, writable=True))
                purged = await purge_log(log, regions, folder, selection, threads)
                error = ""
            except (OSError, ConfigError, StoreFault) as problem:
                error = str(problem)
        await threads.run(partial(_answer, f"{path}/purged-{mark}.json", purged, error))


def _pop_request(path: str) -> tuple[str, _Request | None] | None:
    """Pop a request from the folder, if any: its mark, and its content or None if it is void.

    Answers that were not read are removed.
    """
    names = os.listdir(path)
    _remove_old([f"{path}/{name}" for name in names if _ANSWER.fullmatch(name)], path)
    for name in names:
        place = f"{path}/{name}"
        if match := _REQUEST.fullmatch(name):
            asked = _read_untrusted(place, _Request)
            with suppress(FileNotFoundError):
                os.unlink(place)
                is_void = asked is None or time.time() > asked.until_s
                return match[1], None if is_void else asked
    return None


def _remove_old(answers: Sequence[str], path: str) -> None:
    """Remove answers that were not read in time, by the filesystem's clock.

    By this host's, a filesystem that is behind it would lose every answer at once.
    """
    if answers:
        with suppress(OSError):
            old_s = time.time() + clock_ahead_s(path) - LEFT_FOR_S_MAX
            for answer in answers:
                with suppress(FileNotFoundError):  # it has just been read
                    if os.lstat(answer).st_mtime < old_s:
                        os.unlink(answer)


def _answer(path: str, purged: Purged, error: str) -> None:
    removed = [
        (kind.namespace.hex(), kind.key_id.hex(), kind.block_bytes, keys.count())
        for kind, keys in purged.kinds.items()
    ]
    _write(path, _Answer(removed, purged.regions_failed, error))


# --- files ---


def _write(path: str, value: _Request | _Answer) -> None:
    """Write a file for the folder's owner alone. Raises ``Misuse``."""

    def write(unfinished: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(unfinished, flags, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            owner = os.stat(unfinished.parent)
            if os.geteuid() == 0 != owner.st_uid:  # the engine could not read it otherwise
                os.fchown(descriptor, owner.st_uid, owner.st_gid)
            file.write(msgspec.json.encode(value))

    write_whole(path, write)


def _read_untrusted(path: str, kind: type[_T]) -> _T | None:
    """Return a file's content; None if it is missing, invalid or not of a trusted user."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        own = about.st_uid in (0, os.geteuid(), os.stat(os.path.dirname(path)).st_uid)
        if not (own and stat.S_ISREG(about.st_mode) and not about.st_mode & 0o077):
            return None
        try:
            return msgspec.json.decode(file.read(_FILE_BYTES_MAX), type=kind)
        except (OSError, ValueError, RecursionError):  # invalid UTF-8 is not a DecodeError
            return None
