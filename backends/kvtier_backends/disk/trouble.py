"""What an error at a region means: what its blocks' stores are told, and when it is tried again."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from kvtier.backend import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from kvtier_backends.disk.regions import Regions
    from kvtier_backends.ledger import Ledger

NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
SICK_MEDIUM: Final = frozenset({errno.EIO, errno.EREMOTEIO, errno.EUCLEAN, errno.ENODATA})
"""Errors that speak of one place on the medium: its region is retired."""

NO_ROOM_PAUSE_S: Final = 30.0
RETIRED_PAUSE_S: Final = 300.0


class RegionTrouble:
    """Judges errors, retires regions for a while, and revives them. Event loop only.

    ``clock`` gives seconds. ``lose`` is told each region whose blocks are lost.
    """

    def __init__(
        self,
        regions: Regions,
        ledger: Ledger,
        clock: Callable[[], float],
        lose: Callable[[int], None],
    ) -> None:
        self._regions = regions
        self._ledger = ledger
        self._clock = clock
        self._lose = lose
        self._retry_at: dict[int, float] = {}

    def open_failed(self, region: int, problem: OSError, allocated: Container[int]) -> bool:
        """Take a region that cannot be opened out of the way. False: no other will do better.

        ``allocated`` are the regions that need no room of the disk any more.
        """
        if problem.errno in NO_ROOM:
            self._ledger.trouble("store", "no_room_for_a_region", problem)
            empty_handed = self._regions.retire_free(allocated)
            self._regions.retire(region)
            retry_at = self._clock() + NO_ROOM_PAUSE_S
            self._retry_at.update(dict.fromkeys([*empty_handed, region], retry_at))
            return True
        self._ledger.trouble("store", "stores_failed", problem)
        if problem.errno not in SICK_MEDIUM:
            return False
        self.sick(region, problem)
        return True

    def store_failed(self, region: int, problem: OSError) -> Outcome:
        """Return what becomes of blocks that could not be written, or not be named."""
        if problem.errno in NO_ROOM:
            self._ledger.trouble("store", "no_room_for_a_block", problem)
            return Outcome.FULL
        if problem.errno == errno.EFBIG and self._regions.open_region == region:
            self._regions.fill()
        self._ledger.trouble("store", "stores_failed", problem)
        self.sick(region, problem)
        return Outcome.FAILED

    def sick(self, region: int, problem: OSError) -> None:
        """Retire a region if its medium is sick; what it held is lost."""
        if problem.errno in SICK_MEDIUM and self._regions.retire(region):
            self._ledger.trouble("store", "regions_retired", problem)
            self._retry_at[region] = self._clock() + RETIRED_PAUSE_S
            self._lose(region)

    def revive(self) -> None:
        """Give retired regions whose pause is over another try."""
        now = self._clock()
        for region in [region for region, at in self._retry_at.items() if at <= now]:
            if self._regions.revive(region):
                del self._retry_at[region]
