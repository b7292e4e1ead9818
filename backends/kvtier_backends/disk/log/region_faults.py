"""Decides what a region's error means: the outcome of its blocks' stores, and what to retry.

A disk that fails for a moment must not lose its blocks. So one failure discards
nothing that is sound: a region whose opening failed is set aside while it
is empty, one that could not be written is only sealed, and blocks that could not
be read stay in the index until it is certain that the fault is their region's and not
the whole medium's. While writing is in doubt, no region is reclaimed, and a
store that needs a region probes one first: if the probe fails, the store fails, so
that the sender of stores sees it and waits.
"""

from __future__ import annotations

import errno
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.plugin_api.backend import Outcome
from kvtier_backends.posix import NO_ROOM

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvtier_backends.disk.device import Transfer
    from kvtier_backends.disk.log.regions import Regions
    from kvtier_backends.incidents import IncidentLog, TierCounters

MEDIUM_ERRORS: Final = frozenset({errno.EIO, errno.EREMOTEIO, errno.EUCLEAN, errno.ENODATA})
"""Errors that may concern one place on the medium: another region is tried."""

NO_ROOM_PAUSE_S: Final = 30.0
RETIRED_PAUSE_S: Final = 300.0
STRIKES_MAX: Final = 3
"""A region that fails this many reads, while another place can be read, is given up."""


class Lack(Enum):
    """Why a region was retired."""

    ROOM = "room"
    MEDIUM = "medium"


class Retired(NamedTuple):
    """A region that is out of use for a while."""

    lack: Lack
    retry_at: float


class Suspect(NamedTuple):
    """A region that could not be read: where in it, and how often while another place could."""

    at: int
    size: int
    strikes: int


class RegionFaults:
    """Decides what errors mean, and tracks retired and suspected regions. Event loop only.

    ``clock`` returns seconds. ``on_lost`` is called with each region whose blocks are lost.
    """

    def __init__(
        self,
        regions: Regions,
        incidents: IncidentLog,
        counters: TierCounters,
        clock: Callable[[], float],
        *,
        on_lost: Callable[[int], None],
    ) -> None:
        self._regions = regions
        self._incidents = incidents
        self._counters = counters
        self._clock = clock
        self._on_lost = on_lost
        self._in_doubt = False
        self._has_no_room = False  # for a block of a region that has its room
        self._suspects: dict[int, Suspect] = {}
        self._retired: dict[int, Retired] = {}

    @property
    def in_doubt(self) -> bool:
        """Whether writing failed, and nothing was written since."""
        return self._in_doubt

    @property
    def is_full(self) -> bool:
        """Whether the filesystem had no room when it was last asked for some."""
        lacks_room = (lack is Lack.ROOM for lack, _ in self._retired.values())
        return self._has_no_room or any(lacks_room)

    def report_full(self, blocks: int) -> None:
        """Count blocks that are not stored for want of room."""
        if self.is_full:
            problem = OSError(errno.ENOSPC, "no region has room")
            self._incidents.report("store", "stores_full", problem, count=blocks)
        else:
            self._counters.add("stores_full", blocks)

    def _report_no_room(self, name: str, problem: OSError) -> None:
        """Log it; the blocks that it hits are counted by ``report_full``."""
        self._incidents.report("store", name, problem, blocks=0)

    @property
    def suspects(self) -> Mapping[int, Suspect]:
        """The regions that could not be read, the one to read next first."""
        return self._suspects

    # --- writing ---

    def open_failed(self, region: int, problem: OSError) -> Outcome | None:
        """Return the outcome of a store whose region cannot be opened; None: try the next one."""
        if problem.errno in NO_ROOM and not self._regions.is_allocated(region):
            self._report_no_room("no_room_for_a_region", problem)
            retired = [region, *self._regions.retire_unallocated()]
            self._regions.retire(region)
            for each in retired:
                self._defer(each, Lack.ROOM, NO_ROOM_PAUSE_S)
            return None
        self._in_doubt = True
        if problem.errno in NO_ROOM:
            # It has its room already: on some filesystems each write takes new room.
            self._has_no_room = True
            self._report_no_room("no_room_for_a_block", problem)
            return Outcome.FULL
        self._incidents.report("store", "stores_failed", problem)
        if problem.errno not in MEDIUM_ERRORS:
            return Outcome.FAILED
        if self._regions.retire(region):
            self._incidents.report("store", "regions_retired", problem)
        self._defer(region, Lack.MEDIUM, RETIRED_PAUSE_S)
        return None

    def store_failed(self, region: int, problem: OSError) -> Outcome:
        """Return the outcome of blocks that could not be written, or whose entries could not."""
        is_open = self._regions.open_region == region
        if problem.errno in NO_ROOM:
            self._report_no_room("no_room_for_a_block", problem)
            self._in_doubt = self._has_no_room = True
            return Outcome.FULL
        if is_open and (problem.errno == errno.EFBIG or problem.errno in MEDIUM_ERRORS):
            self._regions.fill()  # its blocks stay: the next ones go elsewhere
        self._incidents.report("store", "stores_failed", problem)
        self._in_doubt = self._in_doubt or problem.errno != errno.EFBIG
        return Outcome.FAILED

    def region_to_probe(self) -> int | None:
        """Return the region that a store in doubt is to probe: a free one, else a retired one."""
        free = self._regions.free()
        if free:
            return next(filter(self._regions.is_allocated, free), free[0])
        retired = (each for each, why in self._retired.items() if why.lack is Lack.MEDIUM)
        return next((each for each in retired if self._regions.is_at_rest(each)), None)

    def probed(self, region: int, problem: OSError | None) -> Outcome | None:
        """Note how a probe ended; return the outcome of the store, None if it may go on."""
        if problem is None:
            self.write_succeeded()
            self.revive(region)
            return None
        if region in self._retired:
            self._retired[region] = self._retired.pop(region)  # another one is next
        elif problem.errno in NO_ROOM and not self._regions.is_allocated(region):
            return self.open_failed(region, problem)
        else:
            self._regions.use_last(region)
        if problem.errno in NO_ROOM:
            self._has_no_room = True
            self._report_no_room("no_room_for_a_block", problem)
            return Outcome.FULL
        self._incidents.report("store", "stores_failed", problem)
        return Outcome.FAILED

    def end_doubt(self) -> None:
        """Stop doubting that writing works: there is no region to probe."""
        self._in_doubt = False

    def write_succeeded(self) -> None:
        """Note that a write succeeded: regions retired for the medium may be tried now."""
        self._has_no_room = False
        if self._in_doubt:
            self._in_doubt = False
            for region, (lack, _) in self._retired.items():
                if lack is Lack.MEDIUM:
                    self._retired[region] = Retired(lack, self._clock())

    # --- reading ---

    def read_failed(self, transfer: Transfer, problem: OSError) -> None:
        """Suspect the region: whether its blocks are lost is decided later."""
        if transfer.region not in self._suspects:
            self._incidents.report("load", "regions_suspected", problem)
            self._suspects[transfer.region] = Suspect(transfer.at, transfer.size, 0)

    def acquit(self, region: int) -> None:
        """Note that a suspect could be read after all, or has no blocks to read any more."""
        self._suspects.pop(region, None)

    def ask_last(self, region: int) -> None:
        """Have a suspect read again after all others."""
        self._suspects[region] = self._suspects.pop(region)

    def strike(self, region: int, problem: OSError) -> None:
        """Note that a suspect failed while another place could be read. Eventually it is lost."""
        suspect = self._suspects[region]
        if suspect.strikes + 1 < STRIKES_MAX:
            self._suspects[region] = suspect._replace(strikes=suspect.strikes + 1)
            return
        del self._suspects[region]
        if self._regions.retire(region):
            self._incidents.report("load", "regions_retired", problem)
            self._defer(region, Lack.MEDIUM, RETIRED_PAUSE_S)
            self._on_lost(region)

    # --- trying again ---

    def due(self) -> list[int]:
        """Return the retired regions that may be tried again now."""
        now = self._clock()
        return [
            region
            for region, (_, retry_at) in self._retired.items()
            # A clock that was set back must not make a pause longer.
            if not now < retry_at <= now + RETIRED_PAUSE_S and self._regions.is_at_rest(region)
        ]

    def revive(self, region: int) -> None:
        """Put a retired region back into use: it could be written."""
        if region in self._retired and self._regions.revive(region):
            del self._retired[region]

    def still_fails(self, region: int, problem: OSError) -> None:
        """Defer a retired region's next try; if room is lacking, that of all that wait for room."""
        if problem.errno in NO_ROOM:
            for each, (lack, _) in list(self._retired.items()):
                if lack is Lack.ROOM or each == region:
                    self._defer(each, lack, NO_ROOM_PAUSE_S)
        else:
            self._defer(region, self._retired[region].lack, RETIRED_PAUSE_S)

    def _defer(self, region: int, lack: Lack, pause_s: float) -> None:
        self._retired[region] = Retired(lack, self._clock() + pause_s)
