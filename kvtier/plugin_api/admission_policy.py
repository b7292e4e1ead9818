"""Defines the interface of an admission policy, as plain calls.

Every block that the GPU stores is offered to every tier. Most blocks are
never used again, so a tier with expensive writes (an SSD wears out, an object
store charges for each) may be given an admission policy, which lets only some
of them through. It never waits and does no I/O; ``kvtier/engine/link/admission_gate.py``
gives it a mailbox. A third party registers a class under the entry-point
group ``kvtier.admission_policies``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.keys import Key, RequestId
    from kvtier.plugin_api.options import Options


REMEMBERED_BLOCKS_A_SLOT: Final = 8
"""Blocks that a policy remembers for each slot of the primary tier, by default."""


REMEMBERED_BLOCKS_MAX: Final = 1 << 26
"""The most blocks that may be remembered: their memory is allocated at the start."""


@dataclass(frozen=True)
class AdmissionContext:
    """Facts about the runtime that a policy serves."""

    block_bytes: int
    slot_count: int  #: of the primary tier

    def remembered_blocks_max(self, options: Options) -> int:
        """Read the option of that name, which all policies with a memory have."""
        default = REMEMBERED_BLOCKS_A_SLOT * self.slot_count
        return options.integer(
            "remembered_blocks_max", default, minimum=1, maximum=REMEMBERED_BLOCKS_MAX
        )


class AdmissionPolicy(ABC):
    """Decides for one tier. Reads its own keys from ``options``; unknown ones are refused."""

    @abstractmethod
    def __init__(self, options: Options, context: AdmissionContext) -> None:
        """Check the options. Raises ``ConfigError``."""

    @abstractmethod
    def admit(self, keys: Sequence[Key], request: RequestId) -> list[bool]:
        """Return for each of ``keys``, head to tail of ``request``, whether it is worth writing."""

    def touch(self, keys: Sequence[Key], request: RequestId) -> None:  # noqa: B027 - as pass_time
        """Learn that ``request`` continues from ``keys``, which it found in the primary tier."""

    @abstractmethod
    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> list[Key]:
        """Learn that ``request`` is over, and has used ``order``: all its keys, head to tail.

        Return the keys that were refused earlier and are worth writing now:
        those still in the primary tier will be offered again.
        """

    def pass_time(self, now: float) -> None:  # noqa: B027 - most policies need no clock
        """Learn the time, ``now``: seconds of the runtime's clock, about once a second."""
