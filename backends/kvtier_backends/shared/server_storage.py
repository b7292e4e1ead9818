"""The servers of a tier for ``kvtier ls`` and ``purge``: walks over names are coroutines."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from kvtier.plugin_api.offline import Contents, NamespaceBlocks, Offline, Removed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier.plugin_api.offline import Selection
    from kvtier.plugin_api.progress import ShowProgress


class ServerStorage(Offline):
    """Servers that are reached by an address; their coroutines raise ``StoreFault``."""

    schemes: ClassVar[tuple[str, ...]]  #: beginnings of its addresses, without ``://``

    @classmethod
    @override
    def at(cls, place: str) -> Offline | None:
        scheme, mark, _ = place.partition("://")
        return cls.from_options({"url": place}) if mark and scheme in cls.schemes else None

    @abstractmethod
    async def _size(self) -> int | None:
        """Return the total by which a walk over all names advances; None: not known."""

    @abstractmethod
    async def _list(self, advance: Callable[[int], None]) -> dict[str, NamespaceBlocks]:
        """Return the blocks by namespace. ``advance``: called as the walk progresses."""

    @abstractmethod
    async def _describe(self, advance: Callable[[int], None]) -> dict[str, dict[str, Any]]:
        """Return the facts of each namespace. ``advance``: called as the walk progresses."""

    @abstractmethod
    async def _remove(
        self, selection: Selection, advance: Callable[[int], None], *, dry: bool
    ) -> tuple[dict[str, NamespaceBlocks], int]:
        """Remove blocks; return them, and the number of names that could not be removed.

        Descriptions go with whole namespaces: a running engine writes its own again.
        """

    @override
    def list(self, progress: ShowProgress) -> Contents:
        with progress("looking at names", asyncio.run(self._size())) as bar:
            held = asyncio.run(self._list(bar.advance))
        return Contents([*held.values()])

    @override
    def describe(self, progress: ShowProgress) -> Mapping[str, Mapping[str, Any]]:
        with progress("looking for namespaces", None) as bar:
            return asyncio.run(self._describe(bar.advance))

    @override
    def remove(self, selection: Selection, progress: ShowProgress, *, dry: bool) -> Removed:
        label = "looking at names" if dry else "removing"
        with progress(label, asyncio.run(self._size())) as bar:
            gone, failed = asyncio.run(self._remove(selection, bar.advance, dry=dry))
        return Removed.of_blocks(gone.values(), failed)
