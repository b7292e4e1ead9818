"""Settings of the library's that make tests short: it takes them from the environment."""

from __future__ import annotations

import pytest


@pytest.fixture
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library wait for 2 seconds for what hangs."""
    for name, value in (
        ("MC_RPC_TIMEOUT_MS", "2000"),
        ("MC_RPC_CONNECT_TIMEOUT_MS", "2000"),
        ("MC_TCP_STATUS_TIMEOUT_SEC", "2"),
        ("MC_TCP_PROGRESS_TIMEOUT_SEC", "2"),
    ):
        monkeypatch.setenv(name, value)
