"""What a soak takes from kvtier's log: a policy that raised, unless it had no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.plugin_api.log import log
from stress.log_file import log_into

if TYPE_CHECKING:
    from pathlib import Path

BROKE = "eviction policy broke, lru takes its place"


def test_a_policy_that_raised_is_noticed_but_not_one_without_memory(tmp_path: Path) -> None:
    with log_into(tmp_path / "log") as noticed:
        log.warning(BROKE, tier="1:disk", detail="ReusePolicy: it raised KeyError: b'k'")
        log.warning(BROKE, tier="1:disk", detail="ReusePolicy: it raised MemoryError: ")
        log.warning(
            BROKE,
            tier="1:disk",
            detail="ReusePolicy: it raised OSError: [Errno 12] Cannot allocate memory",
        )
        log.warning("tier bypassed", tier="1:disk", detail="failed a store")
        log.error("unhandled exception in kvtier thread", thread="1:fs-look", error="KeyError('k')")
    assert noticed.broken_threads == ["KeyError('k')"]
    assert noticed.broken_policies == ["ReusePolicy: it raised KeyError: b'k'"]
    assert len((tmp_path / "log").read_text().splitlines()) == 5
