"""A Ctrl-C that comes between two replays, always at the same place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtier.tools.replay.curves import replay

if TYPE_CHECKING:
    import pytest

    from kvtier.tools.replay.curves import CurvePoint


def interrupt_replays(monkeypatch: pytest.MonkeyPatch, name: str, *, after: int) -> None:
    """Let the replays called by this full name run ``after`` times; the next is a Ctrl-C."""
    done = 0

    def interrupted(*arguments: Any) -> CurvePoint:
        nonlocal done
        done += 1
        if done > after:
            raise KeyboardInterrupt
        return replay(*arguments)

    monkeypatch.setattr(name, interrupted)
