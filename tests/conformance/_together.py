"""Checks at the same time: of a library that takes a second to close a client, and no processor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.testing import BackendCheck, MakeBackend


def together(checks: Sequence[BackendCheck]) -> BackendCheck:
    """Make one check of many. None may be among them that stops threads or measures time."""

    async def all_at_once(make: MakeBackend) -> None:
        async with anyio.create_task_group() as group:
            for check in checks:
                group.start_soon(check, make)

    return all_at_once
