"""Fixtures that every test may use, and the rule that CI skips nothing."""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING

import pytest
import structlog.dev
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.support.starvation import Starvation

if TYPE_CHECKING:
    from collections.abc import Generator


# A background job of a shell ignores SIGINT, and so would all that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A slow machine is no fault: an example may take its time, and so may drawing one. The rest
# is as Hypothesis has it, which in CI draws the same examples each time.
settings.register_profile(
    "kvtier", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvtier")

# Hypothesis also draws the constants of all modules of ours that are loaded: a new literal
# anywhere, or a test that ran before, would have the gate play other stories than were proven.
providers._get_local_constants = lambda: providers._local_constants

# structlog has rich draw a traceback where rich is installed: with all variables, for half a second
# each. Tests log hundreds.
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback

MAY_LEAVE_OUT = os.environ.get("CI") != "true" or os.environ.get("KVTIER_TEST_LEAVE_OUT") == "1"
"""Whether tests may be skipped where the machine lacks what they need: not in CI."""

_STARVATION = Starvation()
_STARVATION.start()


@pytest.fixture
def anyio_backend() -> str:
    """Tier cells run on asyncio, and so do the tests."""
    return "asyncio"


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Have collections look at what tests make alone, and not at all that was imported for them.

    Some tests collect what they have left, and each time walked through a million objects.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Watch from here on whether the test is starved."""
    _STARVATION.begin()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test into a failed one where ``CI`` is ``true``; say how busy it was."""
    report = yield
    _forbid_skip(report)
    if report.failed:
        report.sections.append(("how busy the machine was", _STARVATION.told()))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a module that skips itself as a whole."""
    report = yield
    _forbid_skip(report)
    return report


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not MAY_LEAVE_OUT and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI=true forbids: {report.longreprtext}"
