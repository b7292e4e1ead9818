"""Which processes lose their descriptors or their memory: those that serve already."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stress.plan import Fault
from stress.runtime.processes import ProcessFaults

if TYPE_CHECKING:
    from collections.abc import Iterator

WATCHES = "fd = os.pidfd_open(os.getppid()); "


def serving(does: str) -> Iterator[subprocess.Popen[bytes]]:
    program = f"import os; {does}print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
        child.communicate(b"\n")


@pytest.fixture
def starting() -> Iterator[subprocess.Popen[bytes]]:
    yield from serving("")


@pytest.fixture
def started() -> Iterator[subprocess.Popen[bytes]]:
    yield from serving(WATCHES)


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("few_descriptors", resource.RLIMIT_NOFILE), ("little_memory", resource.RLIMIT_AS)],
)
def test_who_starts_has_all_it_may_take(
    kind: str,
    limit: int,
    starting: subprocess.Popen[bytes],
    started: subprocess.Popen[bytes],
) -> None:
    """Else it would end with a traceback, and the soak with that."""
    usual = resource.getrlimit(limit)
    faults = ProcessFaults(lambda _: [starting.pid, started.pid])
    fault = Fault(kind=kind, target="1:fs", at_s=0.0, for_s=1.0, seed="1", dice=random.Random(1))
    assert faults.begin(fault) == 1
    assert resource.prlimit(starting.pid, limit) == usual
    assert resource.prlimit(started.pid, limit)[0] < 1 << 50
    assert resource.prlimit(started.pid, limit) != usual
    faults.end(fault)
    assert resource.prlimit(started.pid, limit)[0] == usual[1]
