"""Fixtures that every test may use, and the rule that CI skips nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator


@pytest.fixture
def anyio_backend() -> str:
    """Tier cells run on asyncio, and so do the tests."""
    return "asyncio"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test into a failed one where ``CI`` is ``true``."""
    report = yield
    _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a module that skips itself as a whole."""
    report = yield
    _forbid_skip(report)
    return report


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    is_expected_failure = hasattr(report, "wasxfail")
    if os.environ.get("CI") == "true" and report.skipped and not is_expected_failure:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI=true forbids: {report.longreprtext}"
