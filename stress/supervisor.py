"""Runs a soak in a process of its own, and leaves nothing of it behind, however it ends.

A soak may be interrupted at any moment: while a process is started, a filesystem mounted, a
runtime closed. An exception can come between any two of its lines, so what cleans up is not the
soak. This process starts it, waits, and afterwards ends all processes that came from it, takes
away its mounts and removes its folder.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER_PREFIX: Final = "kvtier-stress-"
END_S_MAX: Final = 60.0
"""So long an interrupted soak may take to end by itself: a server of vLLM's ends in order then.
A second signal ends it at once."""

SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_REST_S: Final = 0.05
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h, as the next one
_PR_SET_CHILD_SUBREAPER: Final = 36


def supervised(run: Callable[[], int]) -> int:
    """Run it in a child; returns its exit status, or 128 and the number of the signal."""
    # Blocked, they wait until this process asks for them: nothing here is ever interrupted.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS | {signal.SIGCHLD})
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # whatever the soak leaves is this process's child
    here = os.getpid()
    child = os.fork()
    if child == 0:
        _become_the_soak(here)
        os._exit(_run(run))
    number, status = _wait(child)
    _end_all_children()
    _clean_up(child)
    return 128 + number if number else status


def mount_source(soak: int) -> str:
    """Return what stands in the place of a device where a soak's filesystem is mounted."""
    return f"{FOLDER_PREFIX}{soak}"


def folder_prefix() -> str:
    """Return the prefix of the calling soak's folder: its supervisor finds it by that."""
    return f"{FOLDER_PREFIX}{os.getpid()}-"


def _become_the_soak(supervisor: int) -> None:
    os.setpgid(0, 0)  # Ctrl-C is for the supervisor, which tells this process once
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS | {signal.SIGCHLD})


def _run(run: Callable[[], int]) -> int:
    try:
        return run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        return 1
    except BaseException:  # noqa: BLE001 - it is Python's last
        traceback.print_exc()
        return 1
    finally:
        # The process ends without Python's own end.
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()


def _wait(child: int) -> tuple[int, int]:
    """Wait for the soak; returns the signal that was to end it, or 0, and its exit status."""
    first, kill_at_s = 0, float("inf")
    while True:
        left_s = min(3600.0, max(0.0, kill_at_s - time.monotonic()))
        came = signal.sigtimedwait(SIGNALS | {signal.SIGCHLD}, left_s)
        if came is not None and came.si_signo != signal.SIGCHLD:
            os.kill(child, signal.SIGKILL if first else signal.SIGTERM)
            if not first:
                first, kill_at_s = came.si_signo, time.monotonic() + END_S_MAX
        elif time.monotonic() >= kill_at_s:
            os.kill(child, signal.SIGKILL)
        while (ended := _reap()) is not None:
            pid, status = ended
            if pid == child:
                return first, os.waitstatus_to_exitcode(status)


def _reap() -> tuple[int, int] | None:
    """Return a child that has ended, and how; None: there is none for now."""
    with suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            return pid, status
    return None


def _end_all_children() -> None:
    """Kill whatever came from the soak. A call that hangs ends with the filesystem's server."""
    while True:
        while _reap() is not None:
            pass
        left = _children()
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_REST_S)


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):
            found += map(int, (task / "children").read_text().split())
    return found


def _clean_up(child: int) -> None:
    """Take away the soak's mounts, and then its folder: not the files of what is mounted there."""
    mounts = [line.split(" ")[:2] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in [place for source, place in reversed(mounts) if source == mount_source(child)]:
        subprocess.run(["umount", "-l", place], check=False, capture_output=True)  # noqa: S607
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}{child}-*"):
        shutil.rmtree(folder, ignore_errors=True)


def _prctl(what: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0)
