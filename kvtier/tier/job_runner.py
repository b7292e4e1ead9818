"""Has a tier's jobs cut into parts, and the parts run by the driver of its backend.

Loads and stores wait in queues of their own (``kvtier/tier/batching.py``), with their own
limits, so neither starves the other; as many parts run at once as the backend has threads,
so one big job uses them all. Which store may begin, and what is removed first, is for the
tier's actor to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtier.core import messages as m
from kvtier.plugin_api.backend import Outcome
from kvtier.tier.batching import Part, PartQueue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from kvtier.core.actor import Mailbox
    from kvtier.plugin_api.backend import BackendTraits
    from kvtier.plugin_api.keys import Key
    from kvtier.tier.batching import Job, Piece


class JobRunner:
    """The jobs that wait, and the parts that are at the backend, by their numbers."""

    def __init__(self, traits: BackendTraits, driver: Mailbox) -> None:
        self._driver = driver
        self._loads = PartQueue(
            traits.load_batches_max, traits.load_batch_blocks_min, traits.load_batch_blocks_max
        )
        self._stores = PartQueue(
            traits.store_batches_max, traits.store_batch_blocks_min, traits.store_batch_blocks_max
        )
        self._parts: dict[int, Part] = {}
        self._next_part = 0

    def is_idle(self) -> bool:
        """Tell whether no job waits and no part is at the backend."""
        return not (self._parts or self._loads or self._stores)

    def add(self, job: Job) -> None:
        """Queue a job, which has blocks."""
        (self._loads if job.is_load else self._stores).add(job)

    def start_loads(self) -> None:
        """Send the driver as many loads as may run."""
        while self._loads.next_key is not None:
            part = self._loads.start_part()
            number = self._number(part)
            self._driver.post(m.LoadPart(part=number, keys=part.keys, slots=part.slots))

    def next_store(self, avoid: AbstractSet[Key] = frozenset()) -> Part | None:
        """Begin a store, which ``send_store`` sends; None if none may, or it is one to avoid."""
        key = self._stores.next_key
        if key is None or key in avoid:
            return None
        return self._stores.start_part(avoid)

    def send_store(self, part: Part) -> None:
        """Send the driver a store, with what it is to remove first."""
        number = self._number(part)
        store = m.StorePart(part=number, keys=part.keys, slots=part.slots, remove=part.remove)
        self._driver.post(store)

    def probe(self, probe: int, keys: tuple[Key, ...]) -> None:
        """Ask the backend which of these it has."""
        part = Part(keys, probe=probe)
        self._driver.post(m.ProbePart(part=self._number(part), keys=keys))

    def remove(self, keys: tuple[Key, ...]) -> None:
        """Have the backend remove these, beside any store."""
        part = Part(keys, is_removal=True)
        self._driver.post(m.RemovePart(part=self._number(part), keys=keys))

    def end(self, message: m.PartEnded) -> tuple[Part, tuple[Outcome, ...]] | None:
        """Return a part that ended, with one outcome a block; None if it had ended before."""
        part = self._parts.pop(message.part, None)
        if part is None:
            return None
        if part.pieces:
            (self._loads if part.pieces[0].job.is_load else self._stores).end_part()
        if len(message.outcomes) != len(part.keys):
            return part, (Outcome.FAILED,) * len(part.keys)
        return part, message.outcomes

    def _number(self, part: Part) -> int:
        """Return a number for a part that goes to the driver."""
        self._next_part += 1
        self._parts[self._next_part] = part
        return self._next_part


def end_pieces(
    part: Part, outcomes: tuple[Outcome, ...], seconds: float
) -> Iterator[tuple[Piece, tuple[Outcome, ...]]]:
    """Yield the pieces of a part that took so long, each once its job knows how it ended."""
    end = 0
    for piece in part.pieces:
        start, end = end, end + piece.stop - piece.start
        piece.job.end(piece, outcomes[start:end], (end - start) / len(outcomes) * seconds)
        yield piece, outcomes[start:end]
