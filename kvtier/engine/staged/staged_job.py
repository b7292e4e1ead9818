"""One job of another program's tiering: blocks to load into its slots, or to store from them.

# Invariant: each block of a job ends once, and a job with a copy under way is not finished.
#            Checked: end, _end_copies, what_is_late_has_finished_but_for_its_copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtier.plugin_api.keys import Key, RequestId

NEVER_LATER: Final = float("-inf")
"""The deadline of a job that was given up."""


class Finished(NamedTuple):
    """Outcome of a job. Its slots are no longer touched."""

    job: int
    is_load: bool
    failed: Sequence[Key]  #: the blocks that did not reach their destination
    succeeded: Sequence[Key]
    moved: int  #: how many blocks were read or written


class StagedJob:
    """A job until all its blocks have ended."""

    __slots__ = (
        "at_tier",
        "begun",
        "copying",
        "deadline",
        "failed",
        "is_load",
        "left",
        "moved",
        "number",
        "request",
        "slot_of",
        "succeeded",
    )

    def __init__(
        self,
        number: int,
        request: RequestId,
        slot_of: dict[Key, int],
        *,
        is_load: bool,
        deadline: float,
    ) -> None:
        """``slot_of``: the program's own. ``deadline``: seconds of the runtime's clock."""
        self.number = number
        self.request = request
        self.slot_of = slot_of
        self.is_load = is_load
        self.deadline = deadline
        self.left = dict.fromkeys(slot_of)  #: not copied yet, from head to tail
        self.begun: Sequence[Key] = ()  #: those in ``left`` that are being loaded
        self.at_tier: dict[Key, None] = {}  #: a store's blocks that the tier has been given
        self.copying: set[Key] = set()
        self.succeeded: list[Key] = []
        self.failed: list[Key] = []
        self.moved = 0

    @property
    def has_ended(self) -> bool:
        """Whether all its blocks have ended, and so none is being copied."""
        return not (self.left or self.at_tier or self.copying)

    def begin_copy(self, keys: Iterable[Key]) -> None:
        """Note that the program's slots of these blocks are being read or written."""
        for key in keys:
            del self.left[key]
            self.copying.add(key)

    def end_copy(self, keys: Iterable[Key]) -> None:
        """Note that the copy has ended."""
        self.copying.difference_update(keys)

    def give_to_tier(self, keys: Iterable[Key]) -> None:
        """Note that a store's blocks are on their way to the tier."""
        self.at_tier.update(dict.fromkeys(keys))

    def end(self, keys: Iterable[Key], *, success: bool, moved: bool = False) -> None:
        """Record how blocks ended that are not being copied."""
        for key in keys:
            self.left.pop(key, None)
            self.at_tier.pop(key, None)
            (self.succeeded if success else self.failed).append(key)
            self.moved += moved
        ended = len(self.succeeded) + len(self.failed)
        assert ended + len(self.copying) <= len(self.slot_of), "a block ended twice"

    def give_up(self) -> None:
        """End all its blocks except those being copied, which end soon."""
        self.deadline = NEVER_LATER
        self.end([*self.at_tier, *self.left], success=False)

    def begin_loads(self, keys: Sequence[Key]) -> None:
        """Note which of the blocks in ``left`` are being loaded."""
        self.begun = keys

    def outcome(self) -> Finished:
        """Return how it ended."""
        return Finished(self.number, self.is_load, self.failed, self.succeeded, self.moved)
