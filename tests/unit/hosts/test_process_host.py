"""A tier in a process of its own: it may crash, stop or be killed, and so may its engine.

The processes are real. The link's end is a queue that takes from the host when it is empty.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from kvtier.core import wire
from kvtier.errors import ConfigError
from kvtier.hosts import process_host
from kvtier.hosts.channel import Channel, NoMessage
from kvtier.hosts.choose import make_host
from kvtier.hosts.process_host import TierProcess
from kvtier.hosts.thread_host import TierThread
from kvtier.plugin_api.backend import BackendContext, Namespace, Outcome
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings.runtime_config import TierConfig
from stress.control_group import memory_group
from tests.support.mailboxes import KeptMessages
from tests.support.needs import needs
from tests.support.no_threads import no_threads
from tests.support.other_processes import is_running, state_of
from tests.support.patience import PATIENCE_S, looks, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtier.core.wire import Message

pytestmark = pytest.mark.slow

BLOCK = 8192
SLOTS = 16
KEYS = tuple(bytes([number]) * 36 for number in range(SLOTS))
ALL = tuple(range(SLOTS))
CONTEXT = BackendContext(BLOCK, Namespace({"model": "m"}), "1:x")
KILLED = f"was killed by signal 9{process_host.OUT_OF_MEMORY}"


def memory_tier(**options: Any) -> dict[str, Any]:
    return {"type": "memory", "capacity_bytes": 1 << 20, "isolation": "process", **options}


def disk_tier(path: Path, **options: Any) -> dict[str, Any]:
    return {"type": "disk", "path": str(path), "capacity_bytes": 4 << 20, **options}


class Bench:
    """A started process over sixteen slots."""

    def __init__(
        self, tier: dict[str, Any], *, messages_max: int = 64, rests: dict[bytes, Any] | None = None
    ) -> None:
        self.memory = SlotMemory.anonymous(SLOTS, BLOCK)
        self.memory.rests = rests or {}
        self._messages: queue.Queue[Message] = queue.Queue()
        self.counted: dict[str, int] = {}  # told last
        self.opened = 0
        self.not_run_s = 0.0
        host = make_host(
            TierConfig.from_mapping(1, tier),
            CONTEXT,
            self.memory,
            self,
            messages_max=messages_max,
        )
        assert isinstance(host, TierProcess)
        self.host = host
        self.host.start()

    def post(self, message: Message) -> bool:
        """Stand where the link's inbox is."""
        if isinstance(message, wire.Counted):
            self.counted = message.counters
        elif isinstance(message, wire.TierOpened):
            self.opened += 1
        elif isinstance(message, wire.TierNotRun):  # as the machine is busy
            self.not_run_s += message.seconds
        else:
            self._messages.put(message)
        return True

    @property
    def pid(self) -> int:
        return self.host._child.process.pid

    def next(self) -> Any:

        def has_come() -> bool:
            self.host.poll()
            self.host.wake()
            return not self._messages.empty()

        until(has_come)
        return self._messages.get()

    def next_of(self, kind: type[Any]) -> Any:
        while not isinstance(message := self.next(), kind):
            pass
        return message

    def store(self, keys: tuple[bytes, ...], slots: tuple[int, ...], job: int = 1) -> Any:
        assert self.host.post(wire.StoreJob(job=job, request="r", keys=keys, slots=slots))
        return self.next_of(wire.JobEnded)

    def load(self, keys: tuple[bytes, ...], slots: tuple[int, ...], job: int = 2) -> Any:
        assert self.host.post(wire.LoadJob(job=job, keys=keys, slots=slots))
        return self.next_of(wire.JobEnded)

    def fill(self) -> None:
        for slot in range(SLOTS):
            self.memory.view(slot)[:] = bytes([slot + 1]) * BLOCK

    def until_it_has(self, keys: tuple[bytes, ...]) -> None:
        """Wait until the tier says that it has these: after a start it tells bit by bit."""
        for _ in looks(lambda: "it never had them"):
            assert self.host.post(wire.Probe(probe=1, keys=keys))
            if all(self.next_of(wire.ProbeAnswer).present):
                return


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_host, "RESTART_PAUSE_S", 0.001)


class Busy:
    """A machine that has not run the process since it was asked last."""

    def not_run_s(self, process: int) -> float:
        del process
        return 0.5


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    started: list[Bench] = []
    yield started
    for bench in started:
        assert bench.host.close(PATIENCE_S) is True
        assert has_ended(bench.pid)


def has_ended(pid: int) -> bool:
    """Tell whether the process is gone, and was waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_blocks_come_back_through_shared_slots(benches: list[Bench]) -> None:
    """No byte goes over the channel: the process maps the slots."""
    bench = Bench(memory_tier())
    benches.append(bench)
    bench.fill()
    assert bench.store(KEYS[:2], (0, 1)).outcomes == (Outcome.DONE,) * 2
    ended = bench.load((KEYS[0], KEYS[9], KEYS[1]), (4, 5, 6))
    assert ended.outcomes == (Outcome.DONE, Outcome.ABSENT, Outcome.DONE)
    assert bytes(bench.memory.view(4)) == b"\x01" * BLOCK
    assert bytes(bench.memory.view(6)) == b"\x02" * BLOCK
    assert bytes(bench.memory.view(5)) == b"\x06" * BLOCK


def test_the_process_is_named_after_its_tier(benches: list[Bench]) -> None:
    """As far as the kernel has room: 15 bytes."""
    for name, shown in ((None, "kvtier-1:memory"), ("a-long-name", "kvtier-a-long-n")):
        bench = Bench(memory_tier() if name is None else memory_tier(name=name))
        benches.append(bench)
        assert Path(f"/proc/{bench.pid}/comm").read_text() == f"{shown}\n"


def test_the_process_does_not_take_the_processor_from_the_thread_that_wakes_it(
    benches: list[Bench],
) -> None:
    """In the kernel's words: it is a batch process."""
    bench = Bench(memory_tier())
    benches.append(bench)
    assert os.sched_getscheduler(bench.pid) == os.SCHED_BATCH


def test_the_link_is_told_of_time_for_which_a_process_that_owes_an_answer_is_not_run(
    benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it owes none, nobody waits for it to be run, and the kernel is not asked."""
    monkeypatch.setattr(process_host, "Silence", Busy)
    bench = Bench(memory_tier())
    benches.append(bench)
    bench.host.poll()
    bench.host.poll()
    assert bench.not_run_s == 0.0
    assert bench.host.post(wire.Probe(probe=1, keys=KEYS[:1]))  # not sent yet
    bench.host.poll()
    bench.host.poll()
    assert bench.not_run_s == 1.0
    bench.next_of(wire.ProbeAnswer)
    bench.load(KEYS[:1], (0,))
    bench.store(KEYS[:1], (0,))
    told_s = bench.not_run_s
    bench.host.poll()
    assert bench.not_run_s == told_s


def test_the_kernel_is_asked_once_a_process_has_been_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []

    class Looked:
        def __init__(self, process: int, *, every_s: float) -> None:
            looks.append(process)
            assert every_s == process_host.LOOK_S

        def look(self) -> float:
            return 0.125

    monkeypatch.setattr(process_host, "RunDelays", Looked)
    monkeypatch.setattr(process_host, "LOOK_S", 1e6)
    silence = process_host.Silence()
    assert silence.not_run_s(7) == 0.0
    monkeypatch.setattr(process_host, "LOOK_S", 0.0)
    assert silence.not_run_s(7) == silence.not_run_s(7) == 0.125
    assert looks == [7]


def test_a_process_clears_what_a_block_leaves_of_its_slot(benches: list[Bench]) -> None:
    bench = Bench(memory_tier(), rests={KEYS[1][-4:]: [(100, BLOCK)]})
    benches.append(bench)
    bench.fill()
    bench.store(KEYS[:2], (0, 1))
    bench.load(KEYS[:2], (4, 5))
    assert bytes(bench.memory.view(4)).count(1) == BLOCK
    assert bytes(bench.memory.view(5)[:100]).count(2) == 100
    assert bytes(bench.memory.view(5)[100:]).count(0) == BLOCK - 100


def test_a_bad_setting_is_refused_in_the_backend_s_own_words() -> None:
    with pytest.raises(ConfigError, match="capacity_bytes=1 has no room for one block of 8192"):
        Bench(memory_tier(capacity_bytes=1))
    with pytest.raises(ConfigError, match="eviction_policy='nonesuch' is not installed"):
        Bench(memory_tier(eviction_policy="nonesuch"))
    with pytest.raises(ConfigError, match=r"isolation='somewhere' must be one of thread, process"):
        Bench(memory_tier(isolation="somewhere"))


def test_memory_that_no_process_can_map_gets_a_thread_or_a_refusal(tmp_path: Path) -> None:
    """A backend only prefers a process; a user who asks for one is told why there is none."""
    memory = SlotMemory(memoryview(bytearray(BLOCK)), 1, BLOCK)
    with pytest.raises(
        ConfigError, match=r"1:memory: isolation='process' needs memory that another"
    ):
        make_host(
            TierConfig.from_mapping(1, memory_tier()),
            CONTEXT,
            memory,
            KeptMessages(),
            messages_max=4,
        )
    tier = TierConfig.from_mapping(1, disk_tier(tmp_path / "kv"))
    host = make_host(tier, CONTEXT, memory, KeptMessages(), messages_max=4)
    assert isinstance(host, TierThread)
    host.start()
    assert host.close(PATIENCE_S)


def test_a_killed_process_is_followed_by_another_that_has_what_was_stored(
    tmp_path: Path, benches: list[Bench]
) -> None:
    """The process is the fence: whatever was under way is over once it is gone."""
    bench = Bench(disk_tier(tmp_path / "kv"))
    benches.append(bench)
    bench.fill()
    assert set(bench.store(KEYS, tuple(range(SLOTS))).outcomes) == {Outcome.DONE}
    assert bench.opened == 1
    first = bench.pid
    os.kill(first, signal.SIGKILL)
    assert bench.next_of(wire.TierBroke) == wire.TierBroke(reason=KILLED)
    assert isinstance(bench.next(), wire.TierFenced)
    assert has_ended(first)
    assert isinstance(bench.next(), wire.TierRestarted)
    bench.until_it_has(KEYS)
    assert bench.load(KEYS[:2], (8, 9)).outcomes == (Outcome.DONE,) * 2
    assert bytes(bench.memory.view(9)) == b"\x02" * BLOCK
    assert bench.opened == 1, "the restart was told"


@needs("control group")
def test_a_process_that_runs_out_of_memory_is_followed_by_another(benches: list[Bench]) -> None:
    """The kernel kills it alone, as it does where a control group's processes end one by one."""
    bench = Bench(memory_tier())
    benches.append(bench)
    bench.fill()
    first = bench.pid
    with memory_group(limit_bytes=1) as folder:
        assert folder is not None
        (folder / "cgroup.procs").write_text(str(first))
        broke: Any = None
        for _ in looks(lambda: "it needed no further page"):
            bench.host.post(wire.StoreJob(job=1, request="r", keys=KEYS, slots=ALL))
            broke = bench.next()
            if isinstance(broke, wire.TierBroke):
                break
        assert broke.reason == KILLED
        bench.next_of(wire.TierFenced)
        assert has_ended(first)
    bench.next_of(wire.TierRestarted)
    assert set(bench.store(KEYS, ALL).outcomes) == {Outcome.DONE}


def test_a_cut_off_tier_takes_no_message(benches: list[Bench]) -> None:
    """Nothing sent before the end of one process may be carried out by the next."""
    bench = Bench(memory_tier())
    benches.append(bench)
    os.kill(bench.pid, signal.SIGKILL)
    bench.next_of(wire.TierFenced)
    bench.next_of(wire.TierRestarted)
    assert bench.load(KEYS[:1], (0,)).outcomes == (Outcome.ABSENT,)


def test_a_backend_that_cannot_be_opened_is_cut_off_and_heals_by_itself(
    tmp_path: Path, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is swept away between its claim and the opening."""
    path = tmp_path / "kv"
    real_start = TierProcess.start

    def start(host: TierProcess) -> None:
        shutil.rmtree(path)
        real_start(host)

    monkeypatch.setattr(TierProcess, "start", start)
    bench = Bench(disk_tier(path))
    benches.append(bench)
    assert "No such file" in bench.next_of(wire.TierBroke).reason
    assert isinstance(bench.next(), wire.TierFenced)
    assert isinstance(bench.next(), wire.TierRestarted)
    assert bench.store(KEYS[:1], (0,)).outcomes == (Outcome.DONE,)


def test_a_tier_that_does_not_come_back_says_why_once(
    tmp_path: Path, benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again and again; the log has each reason once."""
    mending = threading.Lock()  # a try between the two steps would find no folder, and make one
    real_try = TierProcess._restart
    tries: list[bool] = []

    def restart(host: TierProcess) -> bool:
        with mending:
            tries.append(real_try(host))
        return tries[-1]

    monkeypatch.setattr(TierProcess, "_restart", restart)
    path = tmp_path / "kv"
    bench = Bench(disk_tier(path))
    benches.append(bench)
    bench.store(KEYS[:1], (0,))
    path.rename(tmp_path / "elsewhere")
    path.write_text("a file in the way")
    with capture_logs() as lines:
        os.kill(bench.pid, signal.SIGKILL)
        bench.next_of(wire.TierFenced)
        until(lambda: tries.count(False) >= 3)
        with mending:
            path.unlink()
            (tmp_path / "elsewhere").rename(path)
        bench.next_of(wire.TierRestarted)
    killed, in_the_way, back = lines
    assert (killed["event"], killed["reason"]) == ("tier disabled", KILLED)
    assert killed["retry_s"] == 0.001
    assert in_the_way["event"] == "tier is still disabled"
    assert str(path) in in_the_way["reason"]
    assert back["event"] == "tier is back"
    bench.until_it_has(KEYS[:1])


@pytest.mark.promise(15)
def test_a_stopped_process_is_not_waited_for_and_is_killed_at_the_end() -> None:
    """Killed, it can't touch the slots any more: they may be unmapped."""
    bench = Bench(memory_tier())
    bench.store(KEYS[:1], (0,))
    os.kill(bench.pid, signal.SIGSTOP)
    keys = (bytes(36),) * 512
    taken = 0
    while bench.host.post(wire.Probe(probe=taken, keys=keys)):
        bench.host.wake()
        bench.host.poll()
        taken += 1
    assert taken >= 64
    bench.host.ask_to_end()
    bench.host.give_up()
    assert bench.host.wait_until_ended(PATIENCE_S)
    assert has_ended(bench.pid)


def test_close_ends_what_was_begun(tmp_path: Path, benches: list[Bench]) -> None:
    """A store that was taken is carried out, so that a restart finds it."""
    bench = Bench(disk_tier(tmp_path / "kv"))
    bench.fill()
    for slot, key in enumerate(KEYS):
        assert bench.host.post(wire.StoreJob(job=slot, request="r", keys=(key,), slots=(slot,)))
    assert bench.host.close(PATIENCE_S) is True
    assert not bench.host.post(wire.Probe(probe=1, keys=KEYS))
    again = Bench(disk_tier(tmp_path / "kv"))
    benches.append(again)
    again.until_it_has(KEYS)


def test_a_tier_that_was_not_started_ends_though_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing once raised that, and then waited for no other tier: they used the slots still."""
    memory, link = SlotMemory.anonymous(SLOTS, BLOCK), KeptMessages()
    for tier in (memory_tier(), memory_tier(isolation="thread")):
        config = TierConfig.from_mapping(1, tier)
        host = make_host(config, CONTEXT, memory, link, messages_max=4)
        with no_threads(monkeypatch):
            with pytest.raises(RuntimeError):
                host.start()
            assert host.close(PATIENCE_S)
        assert not isinstance(host, TierProcess) or has_ended(host._child.process.pid)


def test_signals_for_the_whole_group_are_the_engine_s_to_follow(benches: list[Bench]) -> None:
    """Ctrl-C reaches all processes of a terminal; the engine still wants to store what it has."""
    bench = Bench(memory_tier())
    benches.append(bench)
    bench.store(KEYS[:1], (0,))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(bench.pid, number)
    assert bench.load(KEYS[:1], (1,)).outcomes == (Outcome.DONE,)


def test_a_process_that_sends_rubbish_is_killed_and_replaced(
    benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(memory_tier())
    benches.append(bench)
    bench.store(KEYS[:1], (0,))
    first = bench.pid

    def rubbish(_channel: Channel[Any]) -> list[Any]:
        monkeypatch.undo()
        monkeypatch.setattr(process_host, "RESTART_PAUSE_S", 0.001)
        raise NoMessage("truncated")

    monkeypatch.setattr(Channel, "drain", rubbish)
    assert bench.host.post(wire.Probe(probe=1, keys=KEYS[:1]))  # so that something comes
    assert "sent an invalid message: truncated" in bench.next_of(wire.TierBroke).reason
    assert isinstance(bench.next_of(wire.TierFenced), wire.TierFenced)
    assert has_ended(first)
    assert isinstance(bench.next_of(wire.TierRestarted), wire.TierRestarted)


def test_its_log_lines_and_its_counts_reach_the_engine(
    tmp_path: Path, benches: list[Bench]
) -> None:
    """The engine's log is where people look, and its metrics have the counts."""
    bench = Bench(disk_tier(tmp_path / "kv"))
    benches.append(bench)
    bench.fill()
    bench.store(KEYS, tuple(range(SLOTS)))
    for file in (tmp_path / "kv").glob("segment-*"):
        os.truncate(file, 0)
    with capture_logs() as lines:
        outcomes = bench.load(KEYS, tuple(range(SLOTS))).outcomes
        assert set(outcomes) == {Outcome.DAMAGED}
        until(lambda: bench.host.poll() or bench.counted.get("blocks_truncated"))
    assert bench.counted["bytes_stored"] == SLOTS * BLOCK
    assert [line["kind"] for line in lines] == ["blocks_truncated"]
    assert lines[0]["log_level"] == "warning"


ENGINE = """
import os, structlog, sys
from pathlib import Path
structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
from tests.unit.hosts.test_process_host import KEYS, SLOTS, Bench, disk_tier
bench = Bench(disk_tier(Path(sys.argv[1])))
bench.fill()
bench.store(KEYS, tuple(range(SLOTS)))
is_fork = "forks" in sys.argv and os.fork() == 0
if not is_fork:
    print(bench.pid, flush=True)
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("forks", "stopped"),
    [
        pytest.param((), False, id="alone-running"),
        pytest.param(("forks",), True, id="a fork of it lives on-stopped"),
        # Each is easier than the one above: it has one obstacle of the two.
        pytest.param((), True, id="alone-stopped", marks=pytest.mark.long),
        pytest.param(("forks",), False, id="a fork of it lives on-running", marks=pytest.mark.long),
    ],
)
def test_a_tier_does_not_outlive_its_engine(
    tmp_path: Path, benches: list[Bench], forks: tuple[str, ...], stopped: bool
) -> None:
    """Killed with -9, an engine can't end its tiers: they end by themselves, and let go.

    A fork of the engine has the channel's other end as well, so that doesn't end then.
    A process that is stopped can't do anything by itself: the kernel ends it.
    """
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(tmp_path / "kv"), *forks],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with engine:
        assert engine.stdout is not None
        tier = int(engine.stdout.readline())
        if stopped:
            os.kill(tier, signal.SIGSTOP)
            until(lambda: state_of(tier) == "T")
        engine.kill()
        try:
            until(lambda: not is_running(tier))
        finally:
            with suppress(ProcessLookupError):
                os.kill(tier, signal.SIGKILL)
    bench = Bench(disk_tier(tmp_path / "kv"))  # refused if the folder were still in use
    benches.append(bench)
    bench.until_it_has(KEYS)


def test_a_tier_outlives_the_thread_that_started_it(tmp_path: Path, benches: list[Bench]) -> None:
    """To the kernel a process's parent is a thread. The engine's starting thread may end."""
    threads: list[int] = []

    def start() -> None:
        threads.append(threading.get_native_id())
        benches.append(Bench(disk_tier(tmp_path / "kv")))

    starter = threading.Thread(target=start)
    starter.start()
    starter.join()
    until(lambda: not Path(f"/proc/self/task/{threads[0]}").exists())  # python, then the kernel
    bench = benches[0]
    first = bench.pid
    bench.fill()
    assert set(bench.store(KEYS, tuple(range(SLOTS))).outcomes) == {Outcome.DONE}
    os.kill(first, signal.SIGKILL)
    bench.next_of(wire.TierRestarted)  # by another thread
    bench.until_it_has(KEYS)
    assert bench.pid != first


def test_text_that_is_none_is_sent_all_the_same() -> None:
    """Parts of file names may be no characters: one must not keep all other messages back."""
    program = (
        "import structlog\n"
        "from kvtier.hosts.process_log import send_log_to\n"
        "from kvtier.hosts.channel import Logged\n"
        "import msgspec\n"
        "def say(level, event, fields):\n"
        "    msgspec.msgpack.encode(Logged(level=level, event=event, fields=fields))\n"
        "    print(level, event, fields['path'], fields['size'])\n"
        "send_log_to(say)\n"
        "structlog.get_logger().warning('bad \\udcff name', path='x\\udcff', size=1 << 80)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == f"warning bad \\udcff name x\\udcff {1 << 80}"


def test_a_new_process_that_speaks_another_language_is_tried_again(
    benches: list[Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade under a running engine: the watcher must not end over it."""
    bench = Bench(memory_tier())
    benches.append(bench)
    bench.store(KEYS[:1], (0,))
    tried: list[int] = []
    real = process_host._Child.wait_until_ready

    def wait_until_ready(child: Any, ending: Any) -> Any:
        tried.append(child.process.pid)
        if len(tried) < 3:
            raise NoMessage("Invalid value 'Ready2'")
        return real(child, ending)

    monkeypatch.setattr(process_host._Child, "wait_until_ready", wait_until_ready)
    os.kill(bench.pid, signal.SIGKILL)
    bench.next_of(wire.TierRestarted)
    assert len(tried) == 3
