"""Implements folders of small files on a real filesystem, by ``aiofiles`` on the tier's event loop.

``aiofiles`` passes each call to an executor. asyncio's own would keep the process from ending when
a call hangs, so an executor with daemon threads is passed instead.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

import aiofiles
import aiofiles.os

from kvtier.plugin_api.threads import daemon_thread, start_thread
from kvtier_backends.fs.bound.protocol import SMALL_FILE_BYTES_MAX, Folder
from kvtier_backends.fs.open_root import FOLDER_FLAGS, names_in, refuse_special_file
from kvtier_backends.fs.temporary import temporary_path, this_writer

if TYPE_CHECKING:
    from collections.abc import Callable

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DaemonExecutor(Executor):
    """Runs calls in daemon threads: one that hangs does not keep the process from ending."""

    def __init__(self, threads: int, name: str) -> None:
        self._name = name
        self._threads_max = threads
        self._threads = 0
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._calls = queue.SimpleQueue()
        self._lock = threading.Lock()

    def submit(
        self,
        fn: Callable[Parameters, Answer],
        /,
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Future[Answer]:
        """Queue a call. Raises ``OSError`` if there is no thread, and none can be started."""
        with self._lock:
            if self._threads < self._threads_max:
                self._start_one()
        future: Future[Answer] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - as its base class has it
        """Let each thread end after its current call. Never waits."""
        self._calls.put(None)

    def _start_one(self) -> None:
        try:
            start_thread(daemon_thread(self._work, f"{self._name}-{self._threads}"))
        except OSError:
            if self._threads:
                return  # the others do the work, and the next call tries again
            raise
        self._threads += 1

    def _work(self) -> None:
        while (work := self._calls.get()) is not None:
            _carry_out(*work)
            del work  # an idle thread keeps no folder open
        self._calls.put(None)  # for the next thread


def _carry_out(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as problem:  # noqa: BLE001 - passed to the waiting call
        future.set_exception(problem)
        # Its traceback has this frame: without this, the folders in it stay open until
        # garbage is collected.
        del future
    else:
        future.set_result(result)


class SmallFiles(Folder):
    """An open folder. It is closed when the last user releases it."""

    def __init__(self, descriptor: int, executor: Executor, folder_mode: int) -> None:
        """Take over an open folder."""
        self.descriptor = descriptor
        self._executor = executor
        self._folder_mode = folder_mode
        self._file_mode = folder_mode & 0o666

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.descriptor)

    async def names(self) -> list[str]:
        """Return the names in it."""
        return await self._run(names_in, self.descriptor)

    async def read(self, name: str) -> bytes:
        """Return a small file's bytes. Never waits for anything that is not a file."""
        async with aiofiles.open(
            name, "rb", opener=self._open_for_reading, executor=self._executor
        ) as file:
            content: bytes = await file.read(SMALL_FILE_BYTES_MAX)
            return content

    async def write(self, name: str, data: bytes) -> None:
        """Write a small file in one step."""
        temporary = temporary_path(f".{name}", this_writer())
        try:
            async with aiofiles.open(
                temporary, "wb", opener=self._open_for_writing, executor=self._executor
            ) as file:
                await file.write(data)
            folder = self.descriptor
            await aiofiles.os.rename(
                temporary, name, src_dir_fd=folder, dst_dir_fd=folder, executor=self._executor
            )
        except OSError:
            with suppress(OSError):
                await self.remove(temporary)
            raise

    async def make_folder(self, name: str) -> SmallFiles:
        """Create a folder, and open it."""
        mode = self._folder_mode
        await aiofiles.os.mkdir(name, mode, dir_fd=self.descriptor, executor=self._executor)
        return await self.open_folder(name)

    async def open_folder(self, name: str) -> SmallFiles:
        """Open a folder. Follows no links."""
        descriptor = await self._run(os.open, name, FOLDER_FLAGS, dir_fd=self.descriptor)
        return SmallFiles(descriptor, self._executor, self._folder_mode)

    async def remove(self, name: str) -> None:
        """Remove a file."""
        await aiofiles.os.unlink(name, dir_fd=self.descriptor, executor=self._executor)

    async def remove_folder(self, name: str) -> None:
        """Remove a folder."""
        await aiofiles.os.rmdir(name, dir_fd=self.descriptor, executor=self._executor)

    async def _run(self, call: Callable[..., Answer], *given: object, **named: object) -> Answer:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, partial(call, *given, **named))

    def _open_for_reading(self, name: str, _flags: int) -> int:
        descriptor = os.open(name, _READ_FLAGS, dir_fd=self.descriptor)
        try:
            refuse_special_file(descriptor, name)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _open_for_writing(self, name: str, _flags: int) -> int:
        return os.open(name, _WRITE_FLAGS, self._file_mode, dir_fd=self.descriptor)
