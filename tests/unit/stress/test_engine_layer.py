"""What the engine layer is made of, without an engine."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stress.engine.answers import compare, reference_of
from stress.engine.faults import KINDS
from stress.engine.lost_folder import ASKED_FOR, Operator
from stress.engine.processes import processes_of, role_of, roles_in
from stress.engine.resets import REFUSALS, check_log
from stress.engine.samples import FS
from stress.engine.small_disk import FILES_MAX, FullDisk, Sweeper, small_disk
from stress.engine.tools import CALLS
from stress.engine.under_way import UnderWay
from stress.engine.watch import Watch
from stress.failure import Failure
from stress.plan import Fault, draw_plan
from stress.runtime.files import FolderFaults
from tests.support.needs import needs
from tests.support.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Return the loop that the layer runs on."""
    return "asyncio"


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


def test_an_answer_is_right_token_by_token_but_for_ties() -> None:
    best = [{"token_id:5": -1.0, "token_id:6": -1.0005}, {"token_id:7": -1.0, "token_id:8": -1.1}]
    right = reference_of({"token_ids": [5, 7], "logprobs": {"top_logprobs": best}})
    assert compare(right, [5, 7]).same == 2
    tie = compare(right, [6, 9])
    assert (tie.is_right, tie.is_tie, tie.same) == (True, True, 0)
    assert compare(right, [5]).is_right
    wrong = compare(right, [5, 8])
    assert not wrong.is_right
    assert wrong.text == "output token 1 is 8, and 7"


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


def test_each_tool_of_a_plan_is_known() -> None:
    (tools,) = [kind for kind in KINDS if kind.name == "tools"]
    assert set(tools.targets) == set(CALLS)


@needs("mount")
def test_a_disk_that_is_filled_takes_no_byte_and_is_free_again(tmp_path: Path) -> None:
    fault = next(f for f in draw_plan(1, 600, KINDS).faults if f.kind == "full_disk")
    with small_disk(tmp_path / "small") as is_small:
        assert is_small, "this needs root"
        full = FullDisk(tmp_path / "small", is_small=is_small)
        assert full.begin(fault) == 1
        with pytest.raises(OSError, match="No space left"):
            (tmp_path / "small" / "more").write_bytes(bytes(8192))
        full.end(fault)
        (tmp_path / "small" / "more").write_bytes(bytes(8192))
    assert not os.path.ismount(tmp_path / "small")


@needs("mount")
@pytest.mark.parametrize("seed", range(8))
def test_a_folder_is_replaced_and_comes_back_on_a_full_disk(tmp_path: Path, seed: int) -> None:
    small = tmp_path / "small"
    full_disk = next(f for f in draw_plan(1, 600, KINDS).faults if f.kind == "full_disk")
    with small_disk(small) as is_small:
        assert is_small, "this needs root"
        (small / "fs").mkdir()
        (small / "fs" / "block").write_bytes(bytes(8192))
        (small / "aside").mkdir()
        full = FullDisk(small, is_small=is_small)
        full.begin(full_disk)
        folders = FolderFaults({FS: small / "fs"}, small / "aside")
        fault = Fault(0.0, 1.0, "replace_folder", FS, f"{seed}", random.Random(seed))
        assert folders.begin(fault) == 1
        folders.end(fault)
        full.end(full_disk)
        assert (small / "fs" / "block").read_bytes() == bytes(8192)


def test_sweeping_removes_the_oldest_and_keeps_what_names_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "fs"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number in range(FILES_MAX + 3):
        path = folder / f"{number}"
        path.touch()
        os.utime(path, (number, number))
    sweeper = Sweeper(folder, ())
    sweeper.sweep()
    left = {path.name for path in folder.iterdir()}
    assert left == {"config.json", *(str(number) for number in range(3, FILES_MAX + 3))}
    assert sweeper.blocks == FILES_MAX


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


@pytest.fixture
def tier() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is called as a tier's."""
    call = [sys.executable, "-c", "input()", f"kvtier-{FS}"]
    with subprocess.Popen(call, stdin=subprocess.PIPE, start_new_session=True) as process:
        yield process


def test_a_tier_that_asks_for_it_is_started_again(tier: subprocess.Popen[bytes]) -> None:
    server = Logging(tier.pid)
    operator = Operator(server, UnderWay())  # type: ignore[arg-type] # all that it asks
    server.text += ASKED_FOR[:9]
    operator.look()
    assert operator.started_again == 0
    server.text += ASKED_FOR[9:] + "\n"
    operator.look()
    assert tier.wait(PATIENCE_S) == -signal.SIGKILL
    operator.look()
    assert operator.started_again == 1


def test_a_tier_is_not_started_again_while_its_folder_is_away(
    tier: subprocess.Popen[bytes],
) -> None:
    server, under_way = Logging(tier.pid), UnderWay()
    operator = Operator(server, under_way)  # type: ignore[arg-type] # all that it asks
    with under_way.beside_others(FS):
        server.text += ASKED_FOR
        operator.look()
    assert (operator.started_again, tier.poll()) == (0, None)
