"""No test waits on a real clock for a lock that nobody lets go; logs are checked at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvtier_backends.disk.folder import claim as folder
from tests.unit.backends.disk._log import Engine, begun

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(autouse=True)
def refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim of a folder that is in use is refused without a wait."""
    monkeypatch.setattr(folder, "LOCK_WAIT_S_MAX", 0.0)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    """A log on a fresh simulated disk. When the test ends, what must hold at rest is checked."""
    engine = await begun()
    yield engine
    await engine.check()
