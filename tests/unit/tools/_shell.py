"""Runs commands of ``kvtier`` beside the event loop of a test, and reads their figures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from anyio import to_thread

from kvtier.tools.cli.exit_status import BAD_INPUT
from kvtier.tools.cli.main import main

if TYPE_CHECKING:
    import pytest


class Shell:
    """Runs commands and reads their figures."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def _run(self, *arguments: str) -> int:
        """Run a command as a process of its own would: beside the loop of the tier."""
        return await to_thread.run_sync(main, [*arguments])

    async def __call__(self, *arguments: str) -> dict[str, Any]:
        assert await self._run(*arguments, "--json", "-") == 0
        figures: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        return figures

    async def shown(self, *arguments: str) -> str:
        assert await self._run(*arguments) == 0
        return self._capsys.readouterr().out

    async def refused(self, *arguments: str) -> str:
        assert await self._run(*arguments) == BAD_INPUT
        return self._capsys.readouterr().err


def blocks_in(figures: dict[str, Any]) -> dict[str, int]:
    return {row["namespace"]: row["blocks"] for row in figures["namespaces"]}
