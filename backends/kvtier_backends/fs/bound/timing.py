"""Defines the protocol's pauses, in seconds of the waiter's clock: no two clocks are compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """The pauses of the protocol."""

    busy_s: float = 0.05  #: between two rounds while blocks are stored
    idle_s: float = 1.0  #: the same while nothing happens
    lease_s: float = 10.0  #: a lease unchanged for this long has expired
    dead_s: float = 15.0  #: a writer whose count is unchanged for this long is dead
    hand_back_s: float = 10.0  #: a grant unused for this long is handed back
    uses_s: float = 5.0  #: between two lists of uses of a writer
    epoch_s: float = 5.0  #: uses within one epoch are not distinguished
    save_s: float = 30.0  #: between two copies of the manifest, unless much has changed
    rescan_s: float = 600.0  #: between two scans, unless one is needed sooner
    scan_share_max: float = 0.1  #: share of the time for scans that are needed sooner
    scan_duty: float = 0.25  #: share of the time for which a scan works if nothing waits for it
    evict_s: float = 1.0  #: of a round, for removing block files
    hang_s: float = 20.0  #: a round that takes longer is abandoned
