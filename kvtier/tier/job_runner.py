"""Has a tier's jobs cut into batches, and the batches run by the driver of its backend.

Loads, stores and probes wait in queues of their own (``kvtier/tier/batching.py``,
``kvtier/tier/probes.py``), with their own limits, so none starves another; as many batches run
at once as the backend has threads, so one big job uses them all.

Somebody waits for a load, and nobody for a store, and both take the same storage. So while
anything is loaded, few stores run: under loads without end they go on, that many at a time, in
the order they came. Which store may begin, and what is removed first, is for the tier's actor to
say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.core import messages as m
from kvtier.plugin_api.backend import Outcome
from kvtier.tier.batching import BatchQueue, BlockBatch
from kvtier.tier.probes import ProbeQueue, ProbeSlice

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet

    from kvtier.core.actor import Mailbox
    from kvtier.plugin_api.backend import BackendTraits
    from kvtier.plugin_api.keys import Key
    from kvtier.tier.batching import Job, JobSlice
    from kvtier.tier.probes import RunningProbe


STORES_BESIDE_LOADS_FRACTION: Final = 0.25
"""Of the stores that may run at once: what they keep of the storage while something is loaded."""


class JobRunner:
    """The jobs that wait, and the batches that are at the backend, by their numbers."""

    def __init__(self, traits: BackendTraits, driver: Mailbox) -> None:
        self._driver = driver
        apart = traits.request_scoped
        self._loads = BatchQueue(
            traits.load_batches_max,
            traits.load_batch_blocks_min,
            traits.load_batch_blocks_max,
            apart=apart,
        )
        self._stores = BatchQueue(
            traits.store_batches_max,
            traits.store_batch_blocks_min,
            traits.store_batch_blocks_max,
            apart=apart,
        )
        self._stores_beside_loads = max(
            1, int(traits.store_batches_max * STORES_BESIDE_LOADS_FRACTION)
        )
        self._request_scoped = traits.request_scoped
        self._probes = ProbeQueue(traits)
        self._batches: dict[int, BlockBatch | ProbeSlice] = {}
        self._next_batch = 0

    def is_idle(self) -> bool:
        """Tell whether no job waits and no batch is at the backend."""
        return not (self._batches or self._loads or self._stores or self._probes)

    def add(self, job: Job) -> None:
        """Queue a job, which has blocks."""
        (self._loads if job.is_load else self._stores).add(job)

    def start_loads(self) -> None:
        """Send the driver as many loads as may run."""
        while self._loads.next_key is not None:
            batch = self._loads.start_batch()
            number = self._number(batch)
            load = m.LoadBatch(number, batch.keys, batch.slots, batch.request, batch.deadline)
            self._driver.post(load)

    def next_store(self, avoid: AbstractSet[Key] = frozenset()) -> BlockBatch | None:
        """Begin a store, which ``send_store`` sends; None if none may, or it is one to avoid."""
        key = self._stores.next_key
        if key is None or key in avoid or self._must_wait_for_loads():
            return None
        return self._stores.start_batch(avoid)

    def _must_wait_for_loads(self) -> bool:
        """Tell whether stores have their share already, while something is loaded.

        Not where each request has calls of its own: what one loads may be what another stores.
        """
        if self._request_scoped or not self._loads.is_busy():
            return False
        return self._stores.running >= self._stores_beside_loads

    def send_store(self, batch: BlockBatch) -> None:
        """Send the driver a store, with what it is to remove first."""
        number = self._number(batch)
        store = m.StoreBatch(
            number, batch.keys, batch.slots, batch.remove, batch.request, batch.deadline
        )
        self._driver.post(store)

    def probe(self, probe: RunningProbe) -> None:
        """Have the backend asked which of the probe's keys it has, in turn with other probes."""
        self._probes.add(probe)
        self._start_probes()

    def _start_probes(self) -> None:
        while (batch := self._probes.start_batch()) is not None:
            probe, number = batch.probe, self._number(batch)
            self._driver.post(m.ProbeBatch(number, batch.keys, probe.request, probe.deadline))

    def remove(self, keys: tuple[Key, ...]) -> None:
        """Have the backend remove these, beside any store."""
        batch = BlockBatch(keys)
        self._driver.post(m.RemoveBatch(batch=self._number(batch), keys=keys))

    def end(
        self, message: m.BatchEnded
    ) -> tuple[BlockBatch | ProbeSlice, tuple[Outcome, ...]] | None:
        """Return a batch that ended, with one outcome a block; None if it had ended before."""
        batch = self._batches.pop(message.batch, None)
        if batch is None:
            return None
        outcomes = message.outcomes
        if len(outcomes) != len(batch.keys):
            outcomes = (Outcome.FAILED,) * len(batch.keys)
        if isinstance(batch, ProbeSlice):
            batch.probe.end(batch, outcomes)
            self._probes.end_batch(batch)
            self._start_probes()
        elif batch.slices:
            (self._loads if batch.slices[0].job.is_load else self._stores).end_batch()
        return batch, outcomes

    def _number(self, batch: BlockBatch | ProbeSlice) -> int:
        """Return a number for a batch that goes to the driver."""
        self._next_batch += 1
        self._batches[self._next_batch] = batch
        return self._next_batch


def end_slices(
    batch: BlockBatch, outcomes: tuple[Outcome, ...], message: m.BatchEnded
) -> Iterator[tuple[JobSlice, tuple[Outcome, ...]]]:
    """Yield the slices of a batch, each once its job knows how and when it ended."""
    end = 0
    for job_slice in batch.slices:
        start, end = end, end + job_slice.stop - job_slice.start
        share_s = (end - start) / len(outcomes) * message.seconds
        job_slice.job.end(job_slice, outcomes[start:end], share_s, message.at)
        yield job_slice, outcomes[start:end]
