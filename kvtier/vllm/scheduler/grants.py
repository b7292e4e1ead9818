"""Tracks stores that vLLM was granted and has not completed yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvtier.core.messages import StoreGrant


class OpenGrants:
    """Open grants by request, in the order granted."""

    def __init__(self) -> None:
        self._of: dict[str, list[StoreGrant]] = {}
        self._kept: set[bytes] = set()  # blocks among them that must not be sent to a tier

    def add(self, request: str, grant: StoreGrant, kept: Collection[bytes] = ()) -> None:
        """Add a grant with at least one block. ``kept``: the blocks that stay in host memory."""
        self._of.setdefault(request, []).append(grant)
        self._kept.update(kept)

    def pop(self, keys: Collection[bytes], request: str) -> StoreGrant | None:
        """Remove and return the grant that a store of these keys completes; None if none does."""
        grants = self._of.get(request, [])
        for index, grant in enumerate(grants):
            if grant.keys[0] in keys:
                del grants[index]
                if not grants:
                    del self._of[request]
                return grant
        return None

    def pop_kept(self, keys: Collection[bytes]) -> Collection[bytes]:
        """Remove and return the stored blocks that stay in host memory."""
        kept = self._kept.intersection(keys) if self._kept else ()
        self._kept.difference_update(kept)
        return kept

    def clear(self) -> None:
        """Forget all: their completions will not arrive any more."""
        self._of.clear()
        self._kept.clear()
