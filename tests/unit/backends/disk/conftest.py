"""No test waits on a real clock for a lock that nobody lets go."""

from __future__ import annotations

import pytest

from kvtier_backends.disk.folder import claim as folder


@pytest.fixture(autouse=True)
def refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim of a folder that is in use is refused without a wait."""
    monkeypatch.setattr(folder, "LOCK_WAIT_S_MAX", 0.0)
