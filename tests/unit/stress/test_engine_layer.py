"""What the engine layer sees of its server, without an engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stress.engine.faults import KINDS, UnderWay
from stress.engine.lost_folder import ASKED_FOR, Operator
from stress.engine.processes import processes_of, role_of, roles_in
from stress.engine.resets import REFUSALS, check_log
from stress.engine.small_disk import FullDisk, small_disk
from stress.engine.watch import FS, Watch
from stress.failure import Failure
from stress.plan import draw_plan
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


class Pages:
    """A server that answers with the pages it is given, one after the other."""

    def __init__(self, *pages: str | None) -> None:
        self._pages = iter(pages)

    async def text_between_outages(self, _path: str) -> str | None:
        """Return the next page."""
        return next(self._pages)


def page(name: str, value: float, kind: str = "counter") -> str:
    """Return metrics as Prometheus writes them."""
    return f'# TYPE {name}_total {kind}\n{name}_total{{tier="1:disk",engine="0"}} {value}\n'


def watch(*pages: str | None) -> Watch:
    return Watch(Pages(*pages))  # type: ignore[arg-type] # all that a watch asks of a server


async def test_a_counter_that_falls_is_a_failure() -> None:
    seen = watch(page("kvtier:x", 5), page("kvtier:x", 4))
    await seen.scrape()
    with pytest.raises(Failure, match=r"kvtier:x_total.* fell from 5 to 4"):
        await seen.scrape()


async def test_a_counter_that_goes_away_is_a_failure() -> None:
    seen = watch(page("kvtier:x", 5), page("kvtier:y", 5))
    await seen.scrape()
    with pytest.raises(Failure, match="fell from 5 to None"):
        await seen.scrape()


async def test_counters_of_a_new_server_begin_at_zero_and_add_up() -> None:
    seen = watch(page("kvtier:x", 5), None, page("kvtier:x", 2))
    await seen.scrape()
    seen.server_ended()
    assert not await seen.scrape()
    await seen.scrape()
    assert seen.total("kvtier:x", tier="1:disk") == 7
    assert seen.total("kvtier:x", tier="2:fs") == 0
    assert seen.since_start("kvtier:x") == 2


async def test_what_raises_into_the_engine_is_a_failure() -> None:
    with pytest.raises(Failure, match="kvtier:faults is 1"):
        await watch(page("kvtier:faults", 1)).scrape()


async def test_one_that_is_alone_waits_for_the_others_and_keeps_new_ones_out() -> None:
    under_way, seen = UnderWay(), []

    async def be_alone() -> None:
        async with under_way.alone("b"):
            seen.append("alone")

    with under_way.beside_others("a"):
        waiting = asyncio.create_task(be_alone())
        await asyncio.sleep(0)
        assert under_way.is_closed
        assert not seen
        assert under_way.touched("a", within_s=0.0)
    await waiting
    assert seen == ["alone"]
    assert not under_way.is_closed
    assert under_way.touched("b")
    assert not under_way.touched("c")


def test_a_traceback_in_the_log_is_a_failure_unless_vllm_refuses_to_reset() -> None:
    head = "Traceback (most recent call last):\n  File somewhere\n"
    check_log(f"a line\n{head}{REFUSALS[0]} preempted\n{head}    {REFUSALS[1]}\nAssertionError")
    with pytest.raises(Failure, match="KeyError: 5"):
        check_log(f"{head}{REFUSALS[0]} preempted\n{head}KeyError: 5")


STARTS = """Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/somewhere/kvtier/hosts/process_main.py", line 163, in main
    memory = SlotMemory.of_descriptor(
             ^^^^^^^^^^^^^^^^^^^^^^^^^
"""


@pytest.mark.parametrize(
    "reason",
    ["OSError: [Errno 12] Cannot allocate memory", "OSError: [Errno 24] Too many", "MemoryError"],
)
def test_a_tier_process_that_starts_within_a_limit_may_say_so(reason: str) -> None:
    check_log(f"a line\n{STARTS}{reason}\na line\n")
    served = STARTS.replace("<string>", "/somewhere/vllm/core.py")
    for text in (f"{STARTS}KeyError: 5\n{reason}\n", f"{served}{reason}\n"):
        with pytest.raises(Failure, match="a traceback"):
            check_log(text)


@needs("mount")
def test_a_disk_that_is_filled_takes_no_byte_and_is_free_again(tmp_path: Path) -> None:
    fault = next(f for f in draw_plan(1, 600, KINDS).faults if f.kind == "full_disk")
    with small_disk(tmp_path / "small") as volume:
        assert volume, "this needs root"
        full = FullDisk(volume)
        assert full.begin(fault) == 1
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "small" / "more").write_bytes(bytes(8192))
        full.end(fault)
        (tmp_path / "small" / "more").write_bytes(bytes(8192))
    assert not os.path.ismount(tmp_path / "small")


def test_the_processes_of_a_session_are_found() -> None:
    session = os.getsid(0)
    assert os.getpid() in processes_of(session)
    assert role_of(os.getpid()) in roles_in(session)


class Logging:
    """A server with one process, and a log."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.text = "it has started\n"

    def log(self, since: int = 0) -> str:
        """Return what was logged since."""
        return self.text[since:]

    def log_bytes(self) -> int:
        """Return how much was logged."""
        return len(self.text)


def test_a_tier_is_started_again_only_if_it_asks_for_it_and_its_folder_is_not_away() -> None:
    """Else a tier that never serves again would not show."""
    call = [sys.executable, "-c", "print(flush=True); input()", f"kvtier-{FS}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(call, stdin=pipe, stdout=pipe, start_new_session=True) as tier:
        assert tier.stdout is not None
        tier.stdout.readline()  # before, for a moment, its command line may be empty
        server, under_way = Logging(tier.pid), UnderWay()
        operator = Operator(server, under_way)  # type: ignore[arg-type] # all that it asks
        server.text += ASKED_FOR[:9]
        operator.look()
        server.text += ASKED_FOR[9:] + "\n"
        with under_way.beside_others("1:disk"), under_way.beside_others(FS):
            operator.look()
            assert (operator.started_again, tier.poll()) == (0, None)
        under_way._touched_s.clear()
        operator.look()
        assert tier.wait(PATIENCE_S) == -signal.SIGKILL
        operator.look()
    assert operator.started_again == 1
