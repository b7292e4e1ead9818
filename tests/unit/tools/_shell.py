"""Runs commands of ``kvtier``, and reads their figures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtier.tools.cli.exit_status import BAD_INPUT
from kvtier.tools.cli.main import main

if TYPE_CHECKING:
    import pytest


class Shell:
    """Runs commands; ``out`` and ``err``: what the last one printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *arguments: object, status: int = 0) -> dict[str, Any]:
        """Return the figures of a command, which are all of its standard output."""
        figures: dict[str, Any] = json.loads(self.shown(*arguments, "--json", "-", status=status))
        return figures

    def shown(self, *arguments: object, status: int = 0) -> str:
        """Return what it prints for people."""
        self._capsys.readouterr()
        ended = main([*map(str, arguments)])
        self.out, self.err = self._capsys.readouterr()
        assert ended == status, self.err
        return self.out

    def refused(self, *arguments: object) -> str:
        """Return what is said; nothing else may have been."""
        assert self.shown(*arguments, status=BAD_INPUT) == ""
        return self.err
