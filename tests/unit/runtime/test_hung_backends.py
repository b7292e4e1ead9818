"""No method of a backend can hold up a facade call: none of them runs on the scheduler's thread.

The backend is a third party's, found by its entry point. Each of its methods in
turn hangs until the test ends, with the lock that all the others want, in a thread
cell and in a process.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from kvtier import Namespace, RuntimeConfig, SlotMemory, open_runtime
from kvtier.plugin_api.backend import Backend, ServedRequest
from tests.support.patience import PATIENCE_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvtier import SchedulerFacade

pytestmark = pytest.mark.slow

BLOCK = 4096
SLOTS = 8
AT_START = {"from_options", "place", "filesystem", "discard"}  #: before any cell runs
HANGING = sorted(
    name
    for name, member in vars(Backend).items()
    if not name.startswith("_") and (callable(member) or isinstance(member, property))
)
CALLED_BY_THE_BACKEND = {"on_connection", "on_lost", "on_wanted", "on_wanted_no_more"}
METHODS = [name for name in HANGING if name not in AT_START | CALLED_BY_THE_BACKEND]
OF_A_REQUEST = sorted(
    name
    for name, member in vars(ServedRequest).items()
    if not name.startswith("_") and callable(member)
)
AT_END = {"close", "busy_threads"}
LIMIT_S = 0.05  #: of all that is asked of a tier that hangs until the test ends
IN_A_PROCESS = {"open", "load", "close", "request.load"}
"""Before the tier is open, while it serves, and at its end. Whichever method hangs there, it
is that process's loop that does, so the others show the same again and are ``long``."""

CASES = [
    pytest.param(
        name,
        cell,
        marks=[pytest.mark.long] if cell == "process" and name not in IN_A_PROCESS else [],
    )
    for name in [*METHODS, *(f"request.{name}" for name in OF_A_REQUEST)]
    for cell in ("thread", "process")
    # In a process it isn't asked: the process's end is the fence.
    if (name, cell) != ("busy_threads", "process")
]

MODULE = '''
import inspect
import threading
from dataclasses import replace
from pathlib import Path

from kvtier.plugin_api.backend import ServedRequest
from kvtier_backends.memory import MemoryBackend

LOCK = threading.Lock()
LET_GO = threading.Event()


class Hung(MemoryBackend):
    """Hangs in one method, with the lock that all the others want."""

    type_name = "hung"

    @classmethod
    def from_options(cls, options, context):
        options = dict(options)
        hangs_in, marker = options.pop("hangs_in"), Path(options.pop("marker"))
        made = super().from_options(options, context)
        made.hangs_in, made.marker = hangs_in, marker
        if hangs_in == "probe":  # asked only where others may change what is there
            made.traits = replace(made.traits, capacity_blocks=None)
        if "request" in hangs_in:
            made.traits = replace(made.traits, capacity_blocks=None, request_scoped=True)
        return made

    def begin_request(self, request, params):
        served = Served()
        served.backend = self
        self.on_wanted(request, [b"absent".ljust(32)], served)
        return served

    def hang_in(self, name):
        with LOCK:
            if name == self.hangs_in:
                self.marker.touch()
                LET_GO.wait()


class Served(ServedRequest):
    """A request, to which the blocks of all the others are served."""

    async def probe(self, keys):
        return await self.backend.probe(keys)

    async def load(self, blocks):
        return await self.backend.load(blocks)

    async def store(self, blocks):
        return await self.backend.store(blocks)

    def end(self):
        pass

    def missing(self, keys):
        pass

    def hang_in(self, name):
        self.backend.hang_in("request." + name)


def lock(owner, name):
    real = getattr(owner, name)
    if inspect.iscoroutinefunction(real):

        async def method(self, *arguments):
            self.hang_in(name)
            return await real(self, *arguments)
    else:

        def method(self, *arguments):
            self.hang_in(name)
            return real(self, *arguments)

    setattr(owner, name, method)


for name in METHODS:
    lock(Hung, name)
for name in OF_A_REQUEST:
    lock(Served, name)
'''


@pytest.fixture
def _hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the third party's package; at the end, have what hangs in it go on, and end."""
    site = tmp_path / "site"
    info = site / "hung_backend-1.dist-info"
    info.mkdir(parents=True)
    (site / "hung_backend.py").write_text(
        f"METHODS = {METHODS!r}\nOF_A_REQUEST = {OF_A_REQUEST!r}\n{MODULE}"
    )
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hung-backend\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvtier.backends]\nhung = hung_backend:Hung\n")
    monkeypatch.syspath_prepend(str(site))
    yield
    here = sys.modules.pop("hung_backend", None)  # None: only a process has imported it
    if here is not None:
        here.LET_GO.set()
    until(lambda: not threads_of_tiers(), threads_of_tiers)


def threads_of_tiers() -> list[str]:
    """Return which there are in this process."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("kvtier-1:hung")]


def use(
    facade: SchedulerFacade, memory: SlotMemory, marker: Path, told: list[str], method: str
) -> None:
    """Make every call of a scheduler, until the backend hangs and after that."""
    steps = 0
    hung_for = 0
    while hung_for < 3:
        steps += 1
        hung_for += marker.exists()
        has_stored = facade.statistics().tiers[0].counts.write_bytes
        if method in AT_END and has_stored:
            break
        if not hung_for:
            request, keys = f"r{steps}", [b"%032d" % (3 * (steps % 5) + n) for n in range(3)]
            facade.on_request_started(request, params=msgspec.msgpack.encode({"for": "all"}))
            while facade.lookup_prefix(keys, request) is None:
                facade.step_end()
                time.sleep(0)
            grant = facade.prepare_store(keys, request)
            facade.complete_store(grant.keys if grant else [], request)
            facade.prepare_store(keys, request)  # what is here now, offered once more
            facade.touch(keys, request)
            facade.on_request_finished(request)
        facade.step_end()
        for call in (
            facade.get_finished,
            facade.has_pending_work,
            facade.statistics,
            facade.take_events,
            facade.drain_observations,
        ):
            call()
        told.append("step")
        time.sleep(0)
    facade.reset()
    facade.on_reset_flushed()
    # What the primary tier has is stored and read, whatever the tier does.
    facade.on_request_started("last")
    key = b"last".ljust(32)
    grant = facade.prepare_store([key], "last")
    if grant is not None:  # the tier may hold all slots
        memory.view(grant.slots[0])[:] = bytes(BLOCK)
        facade.complete_store(grant.keys, "last")
        assert facade.lookup(key, "last") is True
        facade.complete_load([key], "last") if facade.prepare_load([key], "last") else None
    facade.on_request_finished("last")
    facade.step_end()
    facade.statistics()
    told.append("used")
    if method in AT_END:  # closing gives up as soon as this hangs, and not before
        facade._tiers[0].ask_to_end()
        until(marker.exists)
    facade.close()
    told.append("closed")


@pytest.mark.usefixtures("_hung")
@pytest.mark.parametrize(("method", "cell"), CASES)
def test_a_backend_that_hangs_with_its_lock_holds_up_no_facade_call(
    method: str, cell: str, tmp_path: Path
) -> None:
    marker = tmp_path / "hangs"
    tier = {
        "type": "hung",
        "hangs_in": method,
        "marker": str(marker),
        "capacity_bytes": 12 * BLOCK,
        "isolation": cell,
        "probe_timeout_s": LIMIT_S,
        "promote_timeout_s": LIMIT_S,
        "store_timeout_s": LIMIT_S,
    }
    config = RuntimeConfig.from_mapping(
        {"secondary_tiers": [tier], "close_timeout_s": LIMIT_S},
        slot_count=SLOTS,
        block_bytes=BLOCK,
    )
    memory = SlotMemory.anonymous(SLOTS, BLOCK)
    facade = open_runtime(config, memory, Namespace({"m": 1}), collect_events=True)
    told: list[str] = []
    user = threading.Thread(target=use, args=(facade, memory, marker, told, method), daemon=True)
    user.start()
    user.join(PATIENCE_S)
    assert not user.is_alive(), f"a facade call hangs after {told[-3:]}"
    assert told[-1] == "closed", told[-3:]
    assert marker.exists(), "the test never called it"
