"""A short run that breaks a promise, in a process of its own: ``python -m`` this, with its name.

What it leaves is told apart from what other tests of the same process have left.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING
from unittest import mock

from kvtier.core.events import EventLog
from kvtier.engine.link.probes import Probes
from stress import load
from stress.__main__ import main
from stress.runtime.layer import RuntimeLayer
from stress.runtime.processes import children
from tests.support.patience import until

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

SHORT = ["--gate", "--seed", "8841", "--faults", "none"]


def nothing() -> AbstractContextManager[object]:
    """Have a few requests: enough to be served from each tier."""
    return mock.patch.multiple(RuntimeLayer, requests_min=500, blocks_read_min=500)


def wrong_bytes() -> AbstractContextManager[object]:
    """Have some blocks stored with the bytes of other weights."""
    real = load.content_of

    def wrong(key: bytes, weights: str) -> bytes:
        return real(key, weights + "?" * (key[0] % 16 == 0))

    return mock.patch.object(load, "content_of", wrong)


def falling_counters() -> AbstractContextManager[object]:
    """Have a counter fall as soon as a tier is asked."""
    real = Probes.ask

    def fall(probes: Probes, message: object) -> None:
        probes._counts.queries -= 10**6  # more than is added meanwhile
        real(probes, message)  # type: ignore[arg-type] # handed on

    return mock.patch.object(Probes, "ask", fall)


def missing_events() -> AbstractContextManager[object]:
    """Have nothing told of what becomes resident."""
    return mock.patch.object(EventLog, "drain", return_value=[])


PLANTS = {each.__name__: each for each in (nothing, wrong_bytes, falling_counters, missing_events)}


if __name__ == "__main__":
    with PLANTS[sys.argv[1]]():
        status = main(SHORT)
    # On a busy machine a tier may have been killed at close, and take a moment to end.
    until(lambda: not children(), lambda: f"{len(children())} processes left")
    print("0 processes left")
    sys.exit(status)
