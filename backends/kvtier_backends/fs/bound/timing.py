"""How long everything takes, in seconds of whoever waits: no two clocks are compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """The pauses of the protocol."""

    busy_s: float = 0.05  #: between two rounds while blocks are stored
    idle_s: float = 1.0  #: while nothing happens
    lease_s: float = 10.0  #: a lease that stands still for so long has expired
    dead_s: float = 15.0  #: a writer whose count stands still for so long is dead
    hand_back_s: float = 10.0  #: a grant that is not used for so long is given back
    uses_s: float = 5.0  #: between two lists of uses of a writer
    epoch_s: float = 5.0  #: uses within one epoch are not told apart
    save_s: float = 30.0  #: between two copies of the manifest, unless much has changed
    rescan_s: float = 600.0  #: between two scans, where nothing asks for one sooner
    scan_share_max: float = 0.1  #: of the time that may be spent scanning, when asked for
    scan_duty: float = 0.25  #: of the time for which a scan works that others need not wait for
    evict_s: float = 1.0  #: of a round, for removing block files
    hang_s: float = 20.0  #: a round that takes longer is given up
