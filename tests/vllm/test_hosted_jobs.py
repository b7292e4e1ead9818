"""How often a hosted tier is stepped, and how long slots are kept from a peer that may write them.

Both are seen on a loop whose time is the test's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult

from kvtier.plugin_api.backend import LoadBlock, Loaded, Outcome
from kvtier.vllm.hosted.finished_notifier import FinishedNotifier
from kvtier.vllm.hosted.jobs import STEP_S, STEP_S_MAX, HostedJobs
from kvtier.vllm.hosted.late_writes import ANSWERS_S, LOOK_S, Peers
from kvtier.vllm.hosted.requests import PeersBlocks
from tests.model.stepped_loop import SteppedLoop

pytestmark = pytest.mark.one_release
BLOCK = 64
SECONDS = 2.0
STEPS_MAX = SECONDS / STEP_S_MAX + 20
"""In that time: at the longest interval, and some at shorter ones before."""

SOURCE = {"kv_request_id": "k", "remote_host": "peer", "remote_port": 1}
READER = ReqContext(req_id="r", kv_transfer_params={"remote_kv_source": SOURCE})


class SilentTier:
    """Resolves lookups when told to; the peer that it is connected to never responds."""

    def __init__(self) -> None:
        self.steps = 0
        self.result = LookupResult.RETRY
        self.finished: list[JobResult] = []
        self._sessions = {"peer:1": SimpleNamespace(alive=True, ready=False)}
        self._data = SimpleNamespace(_peer_nixl_names={"peer:1": "its process"})

    def lookup(self, _key: bytes, _context: ReqContext) -> LookupResult:
        return self.result

    def on_schedule_end(self, _context: object) -> None:
        self.steps += 1

    def get_finished_jobs(self) -> list[JobResult]:
        finished, self.finished = self.finished, []
        return finished

    def submit_load(self, _job: object) -> None:
        pass

    def on_new_request(self, _context: ReqContext) -> RequestOffloadingContext:
        if not self._sessions:
            raise OSError(24, "Too many open files")
        return RequestOffloadingContext()

    def on_request_finished(self, _context: ReqContext) -> None:
        raise RuntimeError("no such request")

    def take_events(self) -> list[Any]:
        return []

    def has_pending_work(self) -> bool:
        return False


class Stepped:
    """The jobs of such a tier, on a loop that a test moves on."""

    def __init__(self) -> None:
        self.loop = SteppedLoop(0.0)
        self.tier: Any = SilentTier()
        self.jobs = HostedJobs(self.tier, "1:silent", lambda _keys: None)
        self.peers = Peers(self.tier, "1:silent", self.jobs)
        self._steps = self.loop.create_task(self.jobs.go_on())
        self.loop.run()

    def begin(self, waiting: Any) -> Any:
        began = self.loop.create_task(waiting)
        self.loop.run()
        return began

    def look_up(self, key: bytes) -> Any:
        return self.begin(self.jobs.look_up([key], READER, lambda: False))

    def steps_in(self, seconds: float) -> int:
        before = self.tier.steps
        self.loop.pass_time(seconds)
        return int(self.tier.steps - before)


def test_a_tier_is_stepped_at_growing_intervals_while_lookups_stay_unresolved() -> None:
    """Each step would ask for the next at once, and a processor would do nothing else."""
    played = Stepped()
    assert not played.steps_in(SECONDS)
    lookups = [played.look_up(b"a"), played.look_up(b"b")]
    assert 0 < played.steps_in(SECONDS) < STEPS_MAX
    played.tier.result = LookupResult.HIT
    played.loop.pass_time(STEP_S_MAX)
    assert [each.result() for each in lookups] == [[True], [True]]
    assert not played.steps_in(SECONDS)


def test_a_new_lookup_is_not_kept_waiting_by_an_older_one() -> None:
    played = Stepped()
    played.look_up(b"a")
    played.steps_in(SECONDS)
    before = played.tier.steps
    played.look_up(b"b")
    assert played.tier.steps == before + 1
    assert played.steps_in(1.5 * STEP_S) == 1


def test_a_tier_is_stepped_at_growing_intervals_while_a_peer_does_not_respond() -> None:
    played = Stepped()
    over: list[bool] = []

    async def waiting() -> bool:
        peer = played.peers.peer_of(READER)
        assert peer is not None
        return await peer.answers(lambda: bool(over))

    answers = played.begin(waiting())
    assert 0 < played.steps_in(SECONDS) < STEPS_MAX
    over.append(True)
    played.loop.pass_time(STEP_S_MAX)
    assert answers.result() is False


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> tuple[Stepped, Any]:
    """A load that failed although its peer is alive, and may still write: it waits for that."""
    monkeypatch.setattr(Peers, "listens", AsyncMock(return_value=True))
    played = Stepped()
    played.tier.result = LookupResult.HIT
    session = played.tier._sessions["peer:1"]
    session.ready = True
    view = memoryview(bytearray(BLOCK)).cast("B", (1, BLOCK))
    notifier = FinishedNotifier(played.tier)
    request = PeersBlocks(played.tier, played.jobs, view, READER, played.peers, notifier)
    block = LoadBlock(b"a", view.cast("B"))
    load = played.begin(request.load([block]))
    request.end()
    played.tier._sessions.clear()
    session.alive = False
    played.tier.finished = [JobResult(1, success=False)]
    played.loop.pass_time(STEP_S_MAX)
    return played, load


def test_what_a_tier_raises_frees_no_slot_that_a_peer_may_still_write(
    failed: tuple[Stepped, Any],
) -> None:
    """Neither at the request's end nor when a connection can't be opened."""
    played, load = failed
    played.loop.pass_time(10 * ANSWERS_S)
    assert (load.done(), played.peers.held) == (False, 1)
    played.tier._sessions["peer:1"] = SimpleNamespace(alive=True, ready=True)
    played.loop.pass_time(ANSWERS_S + 2 * LOOK_S)
    assert (load.done(), played.peers.held) == (True, 0)
    assert load.result() == [Loaded(Outcome.ABSENT)]


def test_a_tier_that_ends_leaves_memory_mapped_that_a_peer_may_still_write(
    failed: tuple[Stepped, Any],
) -> None:
    played, load = failed
    load.cancel()
    played.loop.run()
    assert (load.cancelled(), played.peers.held) == (True, 1)
