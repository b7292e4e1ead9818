"""Tiers that are restarted while their filesystem is away. The filesystem is real."""

from __future__ import annotations

import os
import signal
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from kvtier.core import wire
from kvtier.hosts import process_host, thread_host
from kvtier.hosts.choose import make_host
from kvtier.hosts.process_host import TierProcess
from kvtier.plugin_api.backend import BackendContext, Namespace, Outcome
from kvtier.plugin_api.slot_memory import SlotMemory
from kvtier.settings.runtime_config import TierConfig
from kvtier.tier.bounded_tier import BoundedTier
from kvtier.tier.unbounded_tier import UnboundedTier
from tests.support.fuse_folder import FuseFolder, fuse_folder
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier.core.tier_host import TierHost
    from kvtier.core.wire import Message

BLOCK = 8192
KEYS = tuple(bytes([number]) * 36 for number in range(2))
CONTEXT = BackendContext(BLOCK, Namespace({"model": "m"}), "1:x")

pytestmark = [needs("fuse"), pytest.mark.slow]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FuseFolder]:
    with fuse_folder(tmp_path) as mounted:
        yield mounted


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (thread_host, process_host):
        monkeypatch.setattr(module, "RESTART_PAUSE_S", 0.001)


def raise_a_bug(*_: object) -> None:
    raise RuntimeError("a bug")


class Bench:
    """A started host over four slots."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.memory = SlotMemory.anonymous(4, BLOCK)
        self._messages: deque[Message] = deque()
        tier = TierConfig.from_mapping(1, options)
        self.host: TierHost = make_host(tier, CONTEXT, self.memory, self, messages_max=64)
        self.host.start()

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

    def store(self) -> tuple[Outcome, ...]:
        assert self.host.post(wire.StoreJob(job=1, request="r", keys=KEYS, slots=(0, 1)))
        outcomes: tuple[Outcome, ...] = self.next_of(wire.JobEnded).outcomes
        return outcomes

    def break_down(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the tier's life end, as it does by a bug in an actor or a process that is killed."""
        if isinstance(self.host, TierProcess):
            os.kill(self.host._child.process.pid, signal.SIGKILL)
            return
        with monkeypatch.context() as patch:
            for kind in (BoundedTier, UnboundedTier):
                patch.setattr(kind, "receive", raise_a_bug, raising=False)
            assert self.host.post(wire.Tick(now=0.0))
            self.next_of(wire.TierBroke)


@pytest.mark.parametrize("kind", ["fs", "disk"])
@pytest.mark.parametrize("cell", ["thread", "process"])
def test_a_tier_that_is_restarted_writes_nothing_to_a_bare_mount_point(
    folder: FuseFolder, kind: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m stress --layer filesystem --seed 71``: there it began anew.

    It filled the disk below, and stayed there when the filesystem was back.
    """
    place = str(folder.path / "kv")
    own = {"path": place, "capacity_bytes": 4 << 20} if kind == "disk" else {"root_dir": place}
    bench = Bench({"type": kind, "isolation": cell, **own})
    try:
        assert bench.store() == (Outcome.DONE,) * 2
        folder.vanish()
        with capture_logs() as logs:
            bench.break_down(monkeypatch)
            until(lambda: any("another filesystem" in str(line.get("reason")) for line in logs))
        assert list(folder.path.iterdir()) == []
        again = FuseFolder(folder.source, folder.path)
        try:
            bench.next_of(wire.TierRestarted)
            assert bench.store() == (Outcome.DONE,) * 2
            assert bench.host.close(PATIENCE_S)
        finally:
            again.vanish()
    finally:
        bench.host.close(PATIENCE_S)
