"""Plain client libraries, with which kvtier's tiers for shared storage are compared.

A plain client stores and loads the same blocks on the same server as the tier, without computed
names, digests, signatures, retries or supervision of the connection. Loaded bytes stay in the
library's buffers, so that a copy into the slot does not count against it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kvtier.errors import StoreFault

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvtier.plugin_api.backend import BackendContext

CALLS_AT_ONCE: Final = (1, 4, 8)
"""Numbers of calls that a plain client makes at once. Its best figure counts."""


class PlainClient(ABC):
    """One library's client at the server of one tier. Used on one event loop.

    Calls raise ``StoreFault``, or the library's own exceptions.
    """

    ways: ClassVar[tuple[str, ...]] = ("",)
    """The ways in which the library can move several blocks in one call."""

    is_shared: ClassVar[bool] = True
    """Whether the tier is for several engines, which may sign their blocks."""

    share_promised: ClassVar[float] = 0.9
    """The share of the client's best MB/s that is promised for blocks that no key protects."""

    warm_up_legs: ClassVar[int] = 0
    """Legs that the tier stores before the first round, until all of its storage is in use."""

    library: str  #: its name and version

    def __init__(self, options: Mapping[str, Any], context: BackendContext, token: str) -> None:
        """Read the tier's options. Raises ``ConfigError`` and ``Misuse``.

        ``token``: part of all names, so that no other data is touched.
        """
        self.options = dict(options)
        self.context = context
        self.token = token

    @abstractmethod
    def options_of_tier(self, part: str, leg_bytes: int) -> dict[str, Any]:
        """Return the tier's options, moved to a part of the benchmark's own place.

        ``leg_bytes``: bytes that a side stores before they are removed.
        """

    @abstractmethod
    async def open(self, memory: memoryview) -> None:
        """Connect. ``memory``: contains all buffers."""

    @abstractmethod
    async def store(self, way: str, names: Sequence[str], views: Sequence[memoryview]) -> None:
        """Store blocks in one call."""

    @abstractmethod
    async def load(self, way: str, names: Sequence[str], views: Sequence[memoryview]) -> None:
        """Load blocks in one call. The views are for a library that loads into a buffer."""

    @abstractmethod
    async def remove(self, names: Sequence[str]) -> None:
        """Remove blocks."""

    @abstractmethod
    async def remove_all(self) -> None:
        """Remove everything that the benchmark has stored, the tier's descriptions included."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connection."""


def expect_blocks(lengths: Sequence[int], block_bytes: int) -> None:
    """Raise ``StoreFault`` unless each length is that of a block."""
    if any(length != block_bytes for length in lengths):
        raise StoreFault(
            f"the plain client got {sorted(set(lengths))} bytes instead of {block_bytes} for each "
            "block. Give the server more room, or give fewer --bytes"
        )
