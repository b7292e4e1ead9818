"""Engines that start and end over storage that hangs, fails or is away. The filesystem is real.

A call that hangs in it can't be interrupted: not by a signal, nor by the end of its process.
"""

from __future__ import annotations

import errno
import signal
import subprocess
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from kvtier.core import wire
from kvtier.errors import ConfigError, StorageUnusable
from kvtier.hosts import process_host, thread_host
from kvtier.hosts.choose import make_host
from kvtier.plugin_api.backend import BackendContext, Namespace, Outcome
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.runtime import open_runtime
from kvtier.settings.runtime_config import RuntimeConfig, TierConfig
from tests.support.fuse_folder import FuseFolder, fuse_folder
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S, until
from tests.unit.backends._media import start_python

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.core.tier_host import TierHost
    from kvtier.core.wire import Message

BLOCK = 8192
SLOTS = 8
GIVEN_UP_S = 0.1  #: it hangs until the test heals it
START_S = {"thread": 0.1, "process": 300.0}
"""So long a start waits; for a process on the clock of ``impatient_once_it_hangs``."""

KEYS = tuple(bytes([number]) * 36 for number in range(4))
CONTEXT = BackendContext(BLOCK, Namespace({"model": "m"}), "1:x")

pytestmark = [needs("fuse"), pytest.mark.slow, pytest.mark.promise(15)]
every_host = pytest.mark.parametrize("cell", ["thread", "process"])
every_tier_on_every_host = pytest.mark.parametrize(
    ("kind", "cell"),
    [
        ("fs", "thread"),
        ("disk", "thread"),
        ("disk", "process"),
        # What a process does with a backend over such storage doesn't depend on which it is.
        pytest.param("fs", "process", marks=pytest.mark.long),
    ],
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FuseFolder]:
    with fuse_folder(tmp_path) as mounted:
        yield mounted


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (thread_host, process_host):
        monkeypatch.setattr(module, "RESTART_PAUSE_S", 0.001)
    # Of a process in a call that hangs: it is not gone by then, nor before the test heals it.
    monkeypatch.setattr(process_host, "KILL_S", 0.01)


@pytest.fixture
def impatient_once_it_hangs(folder: FuseFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the starts of processes time out as soon as they hang, and not before.

    A new process takes its time to get to its storage: seconds, on a busy machine.
    """

    class Clock:
        clock_gettime = time.clock_gettime

        @staticmethod
        def monotonic() -> float:
            return 1000.0 if folder.waiting else 0.0

    monkeypatch.setattr(process_host, "time", Clock)


def hanging(kind: str, cell: str, folder: FuseFolder) -> dict[str, Any]:
    """Return the options of a tier that an engine may start without; have its storage hang."""
    folder.hang()
    return options_of(kind, cell, folder, start_timeout_s=START_S[cell], on_unusable="skip")


def options_of(kind: str, cell: str, folder: FuseFolder, **others: Any) -> dict[str, Any]:
    place = str(folder.path / "kv")
    own = {"path": place, "capacity_bytes": 4 << 20} if kind == "disk" else {"root_dir": place}
    return {"type": kind, "isolation": cell, **own, **others}


class Bench:
    """A host over eight slots, and where it reports to."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.memory = SlotMemory.anonymous(SLOTS, BLOCK)
        self._messages: deque[Message] = deque()
        tier = TierConfig.from_mapping(1, options)
        self.host: TierHost = make_host(tier, CONTEXT, self.memory, self, messages_max=64)

    def post(self, message: Message) -> bool:
        """Stand where the link's inbox is."""
        self._messages.append(message)
        return True

    def next_of(self, kind: type[Any]) -> Any:
        found: list[Message] = []

        def came() -> bool:
            self.host.poll()
            self.host.wake()
            while self._messages and not found:
                message = self._messages.popleft()
                if isinstance(message, kind):
                    found.append(message)
            return bool(found)

        until(came, lambda: f"no {kind.__name__} came")
        return found[0]

    def store_and_load(self) -> None:
        """Have blocks go there and come back."""
        for slot in range(4):
            self.memory.view(slot)[:] = bytes([slot + 1]) * BLOCK
        assert self.host.post(wire.StoreJob(job=1, request="r", keys=KEYS, slots=(0, 1, 2, 3)))
        assert self.next_of(wire.JobEnded).outcomes == (Outcome.DONE,) * 4
        assert self.host.post(wire.LoadJob(job=2, keys=KEYS[:1], slots=(4,)))
        assert self.next_of(wire.JobEnded).outcomes == (Outcome.DONE,)
        assert bytes(self.memory.view(4)) == b"\x01" * BLOCK


@pytest.mark.usefixtures("impatient_once_it_hangs")
@every_tier_on_every_host
def test_a_start_over_storage_that_hangs_is_refused(
    folder: FuseFolder, kind: str, cell: str
) -> None:
    """It never returned; the killed process could not end, and was waited for."""
    folder.hang()
    with pytest.raises(StorageUnusable) as refusal:
        Bench(options_of(kind, cell, folder, start_timeout_s=START_S[cell]))
    text = str(refusal.value)
    assert f"secondary tier 1:{kind}: " in text
    assert (
        f"{str(folder.path / 'kv')!r} has not answered for start_timeout_s={START_S[cell]:g} s"
        in text
    )
    assert "on_unusable='skip'" in text


@pytest.mark.usefixtures("impatient_once_it_hangs")
@every_tier_on_every_host
def test_an_engine_may_start_without_it_and_takes_it_up_when_it_comes_back(
    folder: FuseFolder, kind: str, cell: str
) -> None:
    """It is logged once why, and what to do; then that the tier is back."""
    folder.hang()
    options = options_of(kind, cell, folder, start_timeout_s=START_S[cell], on_unusable="skip")
    with capture_logs() as logs:
        bench = Bench(options)
        try:
            assert bench.host.traits is None
            bench.host.start()
            assert "has not answered for start_timeout_s=" in bench.next_of(wire.TierBroke).reason
            bench.next_of(wire.TierFenced)
            assert not bench.host.post(wire.Probe(probe=1, keys=KEYS))
            folder.wait_until_something_hangs()
            folder.heal()
            traits = bench.next_of(wire.TierRestarted).traits
            assert (traits.capacity_blocks is not None) is (kind == "disk")
            bench.store_and_load()
        finally:
            folder.heal()
            assert bench.host.close(PATIENCE_S)
    disabled, back = (line for line in logs if line["event"].startswith("tier "))
    assert (disabled["event"], disabled["tier"]) == ("tier disabled", f"1:{kind}")
    assert "has not answered for start_timeout_s=" in disabled["reason"]
    assert "fix that" in disabled["remedy"]
    assert back["event"] == "tier is back"
    assert (back["tier"], back["place"]) == (f"1:{kind}", str(folder.path / "kv"))
    assert back.get("blocks") == (0 if kind == "disk" else None)


@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
@every_tier_on_every_host
def test_storage_in_trouble_is_refused_or_taken_up_later(
    folder: FuseFolder, kind: str, cell: str, error: int
) -> None:
    folder.fail(error=error)
    with pytest.raises(StorageUnusable, match=r"on_unusable='skip'"):
        Bench(options_of(kind, cell, folder))
    bench = Bench(options_of(kind, cell, folder, on_unusable="skip"))
    try:
        bench.host.start()
        bench.next_of(wire.TierBroke)
        folder.heal()
        bench.next_of(wire.TierRestarted)
        bench.store_and_load()
    finally:
        folder.heal()
        assert bench.host.close(PATIENCE_S)


@every_tier_on_every_host
def test_a_mistake_in_the_configuration_is_refused_all_the_same(
    folder: FuseFolder, kind: str, cell: str
) -> None:
    (folder.source / "kv").write_text("a file")
    options = options_of(kind, cell, folder, on_unusable="skip")
    for wrong in (options, {**options, "pathh": "x"}):
        with pytest.raises(ConfigError) as refusal:
            Bench(wrong)
        assert not isinstance(refusal.value, StorageUnusable)


@pytest.mark.usefixtures("impatient_once_it_hangs")
@every_tier_on_every_host
def test_closing_a_tier_that_never_came_back_is_quick_and_leaves_nothing_at_the_slots(
    folder: FuseFolder, kind: str, cell: str
) -> None:
    """What hangs has never been told of a slot: the memory may be released."""
    folder.hang()
    options = options_of(kind, cell, folder, start_timeout_s=START_S[cell], on_unusable="skip")
    bench = Bench(options)
    bench.host.start()
    bench.next_of(wire.TierFenced)
    bench.host.ask_to_end()
    bench.host.give_up()
    assert bench.host.wait_until_ended(PATIENCE_S)


@every_tier_on_every_host
def test_closing_over_a_load_that_hangs_ends_and_says_that_the_memory_is_in_use(
    folder: FuseFolder, kind: str, cell: str
) -> None:
    """The process is killed and not gone: the kernel may still write to what it was given.

    When it is gone at last, that is known; of a thread it may not be.
    """
    bench = Bench(options_of(kind, cell, folder))
    bench.host.start()
    try:
        bench.store_and_load()
        folder.hang()
        assert bench.host.post(wire.LoadJob(job=3, keys=KEYS[:1], slots=(5,)))
        bench.host.wake()
        folder.wait_until_something_hangs()
        assert not bench.host.close(GIVEN_UP_S)
    finally:
        folder.heal()
        assert bench.host.close(PATIENCE_S) or cell == "thread"


@pytest.mark.usefixtures("impatient_once_it_hangs")
@every_host
def test_an_engine_serves_without_the_tier_that_hangs(folder: FuseFolder, cell: str) -> None:
    """It starts, stores to its other tiers, says what is wrong in its metrics, and ends."""
    folder.hang()
    tier = options_of("fs", cell, folder, start_timeout_s=START_S[cell], on_unusable="skip")
    config = RuntimeConfig(SLOTS, BLOCK, tiers=(TierConfig.from_mapping(1, tier),))
    memory = SlotMemory.anonymous(SLOTS, BLOCK)
    with capture_logs() as logs:
        facade = open_runtime(config, memory, Namespace({"model": "m"}))
    (line,) = logs
    assert (line["event"], line["tier"]) == ("tier disabled", "1:fs")
    assert str(folder.path / "kv") in line["reason"]
    try:
        facade.on_request_started("r")
        assert facade.lookup_prefix(KEYS, "r") == 0
        grant = facade.prepare_store(KEYS, "r")
        assert grant is not None
        facade.complete_store(grant.keys, "r")
        facade.step_end()
        assert facade.lookup_prefix(KEYS, "r") == 4
        facade.on_request_finished("r")
        (tier_now,) = facade.statistics().tiers
        assert tier_now.breaker == "DISABLED"
    finally:
        assert facade.close()


def test_an_engine_that_is_killed_ends_though_a_call_of_its_fs_tier_hangs(
    folder: FuseFolder,
) -> None:
    """A thread in such a call keeps its process from ending; ``fs`` has a process of its own."""
    engine = start_python(
        "-m",
        "tests.unit.hosts._hung_engine",
        folder.path / "kv",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with engine:
        assert engine.stdout is not None
        assert engine.stdin is not None
        assert any(line == "stored\n" for line in engine.stdout)
        folder.hang()
        engine.stdin.write("load\n")
        engine.stdin.flush()
        folder.wait_until_something_hangs()
        engine.kill()
        try:
            assert engine.wait(PATIENCE_S) == -signal.SIGKILL
            assert folder.waiting  # and it ended before the call did
        finally:
            folder.vanish()
