"""Checks in a bounded time whether a folder's storage responds, before a command reads it.

A thread in a call that hangs in the kernel keeps its process from ending, even when that is killed.
So a separate process makes the first calls, and is left behind if they hang.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

ANSWER_S_MAX: Final = 15.0
_KILL_S: Final = 0.5

_LOOKS: Final = """
import itertools, os, stat, sys

def read(name, folder):
    opened = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
    if stat.S_ISREG(os.fstat(opened).st_mode):
        os.pread(opened, 4096, 0)

def look(path):
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.statvfs(folder)
    with os.scandir(path) as entries:
        names = [entry.name for entry in itertools.islice(entries, 64)]
    for name in ["superblock", *names[:8]]:
        try:
            os.stat(name, dir_fd=folder, follow_symlinks=False)
            read(name, folder)
        except OSError:
            pass

path = os.path.abspath(sys.argv[1])
os.write(1, b"!")
while True:
    try:
        look(path)
        break
    except OSError:
        above = os.path.dirname(path)
        if above == path:
            break
        path = above
"""
"""Make a call of each kind, in the folder or the nearest existing one above it. Errors count as
responses."""


def answers(path: str, wait_s: float | None = None) -> bool:
    """Return whether the storage at ``path`` responds in ``wait_s``, or in ``ANSWER_S_MAX``.

    If it doesn't, a process is left behind that ends when the storage is back.
    """
    try:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and program
            [sys.executable, "-I", "-S", "-c", _LOOKS, path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    except (OSError, ValueError):  # not a valid file name, or no process can be started
        return True
    assert process.stdout is not None
    with process.stdout as begins:
        begins.read(1)  # the start of the process is not the storage's time
    try:
        process.wait(ANSWER_S_MAX if wait_s is None else wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
        process.returncode = process.returncode or -1  # nothing waits for it any more
        return False
    return True


def check_answers(path: str) -> None:
    """Raise ``ConfigError`` if the storage at ``path`` doesn't respond in time."""
    if not answers(path):
        raise ConfigError(
            f"{path} has not answered for {ANSWER_S_MAX:g} s: its storage hangs, or is very slow. "
            "Mend the storage, then try again."
        )


def silent_option(options: Mapping[str, Any], wait_s: float | None = None) -> str | None:
    """Return the first key of a tier that names a place whose storage doesn't respond in time."""
    for key, value in options.items():
        is_place = isinstance(value, str) and "/" in value and "://" not in value
        if is_place and not answers(value, wait_s):
            return key
    return None
