"""Ctrl-C and SIGTERM end every command, with 130 or 143, and leave nothing behind.

Each command is a process of its own, and is interrupted once it is seen to be at work on something
that would take it for ever: storage that hangs in a call, a server that never answers, a pipe that
nobody writes to, a million rounds.
"""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvtier.tools.cli.exit_status import INTERRUPTED, TERMINATED
from kvtier.tools.cli.main import COMMANDS
from kvtier_backends.posix import process_stat
from tests.support.other_processes import state_of
from tests.support.patience import PATIENCE_S, until
from tests.support.redis_servers import running
from tests.unit.backends.disk._disk import open_disk
from tests.unit.backends.fs._fs import open_fs
from tests.unit.tools.test_replay_cli import write_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCKS = 12
FOR_EVER = "1000000"
REQUESTS = 50_000
CAPACITIES = ",".join(map(str, range(1, 101)))
MODEL = ("--layers", "2", "--kv-heads", "2", "--head-dim", "64")

PROGRAM = """
import os, sys, time
from kvtier.tools.cli.main import main
from kvtier.tools.doctor import probe

held, sign = sys.argv.pop(1), int(sys.argv.pop(1))
probe.LEG_BYTES, probe.ROUNDS = 16 << 20, 1_000_000

def hang(event, arguments):
    global held
    if event == "open" and held and str(arguments[0]).endswith(held):
        held = ""
        os.write(sign, b"!")
        time.sleep(1e6)

sys.addaudithook(hang)
sys.exit(main())
"""
"""Runs the command. Its first call that opens a file with this end of a name hangs."""


@dataclass
class Work:
    """Something that takes a command for ever."""

    arguments: list[str] = field(default_factory=list)
    hangs_at: str = ""  #: the end of a file's name
    is_at_work: Callable[[], object] | None = None  #: where that is no file
    shows: str = ""  #: on a terminal, once it is at work
    is_busy: bool = False  #: and does not wait in a call
    leftovers: Callable[[], object] = lambda: None


class Place:
    """What a test prepares, below a folder of its own."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack

    def fs(self) -> str:
        async def fill() -> None:
            async with open_fs(self.folder / "kv") as fs:
                for number in range(BLOCKS):
                    await fs.store(number)

        asyncio.run(fill())
        return str(self.folder / "kv")

    def leaf(self) -> str:
        """Return a folder of the fs tier's."""
        return str(next((self.folder / "kv").glob("*/*/*")).relative_to(self.folder / "kv"))

    def disk(self) -> str:
        async def fill() -> None:
            async with open_disk(self.folder / "kv") as disk:
                await disk.store(*range(BLOCKS))
                await disk.come_to_rest()

        asyncio.run(fill())
        return str(self.folder / "kv")

    def pipe(self) -> tuple[str, Callable[[], bool]]:
        """Return a pipe, and what tells whether somebody reads it."""
        path = self.folder / "pipe"
        os.mkfifo(path)

        def is_read() -> bool:
            try:
                writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads it
                return False
            self.stack.callback(os.close, writer)
            return True

        return str(path), is_read

    def silent(self) -> tuple[str, Callable[[], bool]]:
        """Return the address of a server that never answers, and whether somebody has called."""
        server = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.setblocking(False)

        def is_called() -> bool:
            try:
                self.stack.enter_context(server.accept()[0])
            except BlockingIOError:
                return False
            return True

        return f"127.0.0.1:{server.getsockname()[1]}", is_called

    def long_trace(self) -> str:
        """Return a trace that a hundred replays take half a minute for."""
        path = self.folder / "trace.jsonl"
        with path.open("w") as file:
            for number in range(REQUESTS):
                blocks = [*range(4 * number, 4 * number + 4)]
                line = {"time_s": number, "tokens": 64, "output_tokens": 4, "blocks": blocks}
                file.write(f"{json.dumps(line)}\n")
        return str(path)


WORKS: dict[str, Callable[[Place], Work]] = {}


def work(make: Callable[[Place], Work]) -> Callable[[Place], Work]:
    """Register one; its name begins with the command's."""
    WORKS[make.__name__] = make
    return make


@work
def ls_of_a_folder(place: Place) -> Work:
    return Work(["ls", place.fs()], place.leaf())


@work
def ls_of_a_disk(place: Place) -> Work:
    return Work(["ls", place.disk()], "segment-00000.kv")


@work
def ls_of_a_server(place: Place) -> Work:
    address, is_called = place.silent()
    entry = {"type": "redis", "url": f"redis://{address}", "connect_timeout_s": 3600}
    return Work(["ls", json.dumps(entry)], is_at_work=is_called)


@work
def ls_of_a_bucket(place: Place) -> Work:
    address, is_called = place.silent()
    entry: dict[str, Any] = {"type": "s3", "url": "s3://bucket/kv", "endpoint": f"http://{address}"}
    entry |= {"allow_http": True, "access_key_env": "HOME", "secret_key_env": "HOME"}
    return Work(["ls", json.dumps(entry)], is_at_work=is_called)


@work
def fsck_of_a_folder(place: Place) -> Work:
    return Work(["fsck", place.fs(), "--repair"], ".kv")


@work
def fsck_of_a_disk(place: Place) -> Work:
    return Work(["fsck", place.disk(), "--repair"], "segment-00000.kv")


@work
def purge_of_a_folder(place: Place) -> Work:
    return Work(["purge", place.fs(), "--all"], place.leaf())


@work
def purge_of_a_disk(place: Place) -> Work:
    return Work(["purge", place.disk(), "--all"], "segment-00000.kv")


@work
def purge_that_asks(place: Place) -> Work:
    return Work(["purge", place.disk(), "--all"], shows="[y/N]")


@work
def evict_once(place: Place) -> Work:
    return Work(["evict", place.fs(), "--capacity", "1"], place.leaf())


@work
def evict_again_and_again(place: Place) -> Work:
    arguments = ["evict", place.fs(), "--capacity", "1GiB", "--every", FOR_EVER]
    return Work(arguments, shows="Left: ")


@work
def check_of_a_pipe(place: Place) -> Work:
    path, is_read = place.pipe()
    return Work(["check", path], is_at_work=is_read)


@work
def check_that_connects(place: Place) -> Work:
    address, is_called = place.silent()
    tier = {"type": "redis", "url": f"redis://{address}", "connect_timeout_s": 3600}
    file = place.folder / "kv.json"
    file.write_text(json.dumps({"cpu_bytes_to_use": "1GiB", "secondary_tiers": [tier]}))
    return Work(["check", str(file), "--connect"], is_at_work=is_called)


@work
def doctor_of_a_pipe(place: Place) -> Work:
    path, is_read = place.pipe()
    return Work(["doctor", path], is_at_work=is_read)


@work
def doctor_that_probes(place: Place) -> Work:
    folder = place.folder / "kv"
    folder.mkdir(mode=0o700)
    tier = {"type": "disk", "path": str(folder), "capacity_bytes": "1GiB", "io_depth": 1}
    extra: dict[str, Any] = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier.vllm"}
    extra |= {"cpu_bytes_to_use": "64MiB", "secondary_tiers": [tier]}
    return Work(
        ["doctor", json.dumps(extra), "--probe"],
        is_at_work=lambda: any(folder.iterdir()),
        is_busy=True,
        leftovers=lambda: [*folder.iterdir()],
    )


@work
def bench_of_a_disk(place: Place) -> Work:
    folder = place.folder / "kv"
    folder.mkdir(mode=0o700)
    tier = {"type": "disk", "path": str(folder), "capacity_bytes": "1GiB", "io_depth": 1}
    arguments = ["bench", "tier", "--tier", json.dumps(tier), "--bytes", "16MiB"]
    return Work(
        [*arguments, "--block-bytes", "64KiB", "--rounds", FOR_EVER, "--protection"],
        is_at_work=lambda: any(folder.iterdir()),
        is_busy=True,
        leftovers=lambda: [*folder.iterdir()],
    )


@work
def bench_of_a_server(place: Place) -> Work:
    server = place.stack.enter_context(running("valkey", place.folder / "server"))
    tier = {"type": "redis", "url": server.url}
    arguments = ["bench", "tier", "--tier", json.dumps(tier), "--bytes", "64MiB"]
    return Work(
        [*arguments, "--block-bytes", "64KiB", "--rounds", FOR_EVER],
        is_at_work=partial(server.ask, "DBSIZE"),
        is_busy=True,
        leftovers=lambda: server.ask("KEYS", "*"),
    )


@work
def replay_of_a_pipe(place: Place) -> Work:
    path, is_read = place.pipe()
    return Work(["replay", path], is_at_work=is_read)


@work
def replay_that_plays(place: Place) -> Work:
    folder = place.folder / "kv"
    trace = write_trace(place.folder / "trace.jsonl", apart_s=1e6)
    arguments = ["replay", str(trace), "--block-bytes", "4KiB", "--dram", "50%", "--speed", "1"]
    return Work(
        [*arguments, "--tier", f"disk:{folder}:1GiB"],
        is_at_work=(folder / "superblock").exists,
        is_busy=True,
        leftovers=folder.exists,
    )


@work
def replay_of_policies(place: Place) -> Work:
    arguments = ["replay", place.long_trace(), "--policies", "lru"]
    return Work([*arguments, "--capacities", CAPACITIES], shows="replaying", is_busy=True)


@work
def report_of_a_pipe(place: Place) -> Work:
    path, is_read = place.pipe()
    page = place.folder / "page.html"
    return Work(["report", path, "--output", str(page)], is_at_work=is_read)


@work
def size_of_a_pipe(place: Place) -> Work:
    path, is_read = place.pipe()
    return Work(["size", *MODEL, "--trace", path], is_at_work=is_read)


@work
def size_that_replays(place: Place) -> Work:
    arguments = ["size", *MODEL, "--trace", place.long_trace()]
    return Work([*arguments, "--capacities", CAPACITIES], shows="replaying", is_busy=True)


@work
def status_of_a_server(place: Place) -> Work:
    address, is_called = place.silent()
    return Work(["status", address], is_at_work=is_called)


@work
def top_of_a_server(place: Place) -> Work:
    address, is_called = place.silent()
    return Work(["top", address], is_at_work=is_called, shows="\x1b")


class Interrupted:
    """A command that was interrupted: what it said, and what it has left."""

    def __init__(self, given: Work, folder: Path, number: int) -> None:
        mine, its = os.pipe()
        terminal, device = pty.openpty()
        temporary = folder / "temporary"
        temporary.mkdir()
        began_in = folder / "empty"
        began_in.mkdir()
        before = sorted(folder.rglob("*"))
        on_device = device if given.shows else subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, given.hangs_at, str(its), *given.arguments],
            stdin=device if given.shows else subprocess.DEVNULL,
            stdout=on_device,
            stderr=on_device,
            pass_fds=[its],
            cwd=began_in,
            env={
                **os.environ,
                "TMPDIR": str(temporary),
                "TERM": "xterm",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
            start_new_session=True,
        )
        os.close(its)
        os.close(device)
        os.set_blocking(terminal, False)
        self.shown = ""

        def is_shown() -> bool:
            with suppress(OSError):  # nothing yet, or nobody writes there any more
                self.shown += os.read(terminal, 1 << 16).decode(errors="replace")
            return given.shows in self.shown

        try:
            if given.hangs_at:
                assert os.read(mine, 1) == b"!", process.communicate()
            else:
                until(given.is_at_work or is_shown, lambda: self.shown)
            until(lambda: is_shown() or process.poll() is not None, lambda: self.shown)
            # A signal between two calls that wait is lost to the second one, as Python has it.
            until(lambda: given.is_busy or state_of(process.pid) in "SZ")
            interrupted_s = time.monotonic()
            process.send_signal(number)
            if given.shows:
                until(lambda: is_shown() and process.poll() is not None, lambda: self.shown)
            out, err = process.communicate(timeout=PATIENCE_S)
            self.seconds = time.monotonic() - interrupted_s
        finally:
            process.kill()
            process.wait()
            os.close(mine)
            os.close(terminal)
        self.status = process.returncode
        self.said = self.shown + ((out or b"") + (err or b"")).decode()
        self.new = [path for path in sorted(folder.rglob("*")) if path not in before]
        numbers = [each.name for each in Path("/proc").iterdir() if each.name.isdecimal()]
        self.left_running = [pid for pid in map(int, numbers) if _is_of(pid, process.pid)]


def _is_of(pid: int, session: int) -> bool:
    try:
        fields = process_stat(pid)
    except OSError:
        return False
    return int(fields[3]) == session and fields[0] != b"Z"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(tmp_path, stack)


# Not in the gate, which has both signals in test_replay_cli: a signal that comes just before a call
# that waits does not wake it, and no test can see where in a process that is.
@pytest.mark.long
@pytest.mark.parametrize(
    "number", [pytest.param(each, id=each.name) for each in (signal.SIGINT, signal.SIGTERM)]
)
@pytest.mark.parametrize("name", WORKS)
def test_a_command_that_is_interrupted_ends_and_leaves_nothing(
    name: str, number: signal.Signals, place: Place
) -> None:
    given = WORKS[name](place)
    ended = Interrupted(given, place.folder, number)
    print(f"{name}: {number.name}: {ended.seconds:.2f} s")
    assert ended.status == {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}[number], (
        ended.said
    )
    assert "Traceback" not in ended.said
    assert ended.left_running == []
    assert not given.leftovers()
    assert ended.new == []


def test_every_command_is_among_them() -> None:
    at_once = {"alerts", "dashboard"}  # they print a file
    assert {name.partition("_")[0] for name in WORKS} == set(COMMANDS) - at_once
