"""Manages one client of a Mooncake store, from its setup to its end.

It contains two faults of the library:

- A call of a closed or closing client ends the process. So calls are counted: an ending
  client takes no new ones, and the thread that leaves the last one closes it.
- A transfer that takes longer than ``TRANSFER_S_MAX`` is reported as failed, but goes on
  writing to the buffers. Such a load does not return before the client is closed, which
  ends all transfers; until then its buffers stay its own. With SSD offload, closing does
  not end them, and the load never returns.

All methods block, and are for threads. The client reconnects to a master by itself, and
memory stays registered.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import StoreFault
from kvtier_backends.mooncake.library import (
    TRANSFER_S_MAX,
    Code,
    set_environment,
    silence_s,
    told,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvtier_backends.mooncake.library import NativeStore
    from kvtier_backends.mooncake.mooncake_options import MooncakeOptions
    from kvtier_backends.mooncake.registered import RegisteredRegion

_DOUBT_S: Final = TRANSFER_S_MAX - 1.0
"""A load that failed sooner was reported by the transport, which was done with it."""

_never: Final = threading.Event()
"""Waited for when nothing but the end of the process ends a transfer."""

clock = time.monotonic  #: in seconds; tests have their own


class Parts(list[tuple[str, list[int], list[int]]]):
    """The objects of one call: each one's name, and the addresses and sizes of its parts."""

    @property
    def names(self) -> list[str]:
        """The objects' names."""
        return [name for name, _, _ in self]

    @property
    def addresses(self) -> list[list[int]]:
        """Memory addresses of each object's parts."""
        return [addresses for _, addresses, _ in self]

    @property
    def sizes(self) -> list[list[int]]:
        """Sizes of each object's parts."""
        return [sizes for _, _, sizes in self]


class StoreClient:
    """A client that is set up."""

    def __init__(self, library: Any, options: MooncakeOptions, local_hostname: str) -> None:  # noqa: ANN401 - a module without types
        """Set it up. Raises ``StoreFault`` if that fails."""
        set_environment(options.timeout_s)
        self._silence_s = silence_s()
        self._lock = threading.Lock()
        self._calls = 0
        self._is_ending = False
        self._has_ended = threading.Event()
        self._known: set[RegisteredRegion] = set()
        self._native_if_open: NativeStore | None = library.MooncakeDistributedStore()
        ssd = options.ssd_offload_path
        # With SSD offload, the library keeps the transport when the client is closed.
        self._close_ends_transfers = ssd is None
        code = self._native.setup(
            local_hostname,
            options.metadata_server,
            options.segment_bytes,
            options.local_buffer_bytes,
            options.protocol,
            options.device or "",
            options.master,
            enable_ssd_offload=ssd is not None,
            ssd_offload_path=ssd or "",
        )
        if code != 0:
            self._native.close()
            raise StoreFault(f"the client can't be set up: {told(code)}")
        self._placement = library.ReplicateConfig()
        self._placement.replica_num = options.replicas
        if options.soft_pin:
            self._placement.soft_pin_action = library.SoftPinAction.ENABLE
        self._pinned = library.ReplicateConfig()
        self._pinned.with_hard_pin = True

    @property
    def is_ending(self) -> bool:
        """Whether it takes no more calls."""
        return self._is_ending

    def is_healthy(self) -> bool:
        """Return whether the last heartbeat reached the master. Never waits."""
        native = self._native_if_open  # once: another thread may close it
        return not self._is_ending and native is not None and native.health_check() == 0

    def knows(self, regions: Sequence[RegisteredRegion]) -> bool:
        """Return whether all of this memory is registered. Never waits."""
        return self._known.issuperset(regions)

    def register(self, region: RegisteredRegion) -> None:
        """Register memory with the transport, once. Raises ``StoreFault``."""
        if region in self._known:
            return
        with self._calling():
            code = self._native.register_buffer(region.address, region.size)
        if code != 0:
            raise StoreFault(
                f"{region.size} bytes of memory can't be registered: {told(code)}. For RDMA, "
                "allow the process to lock memory (ulimit -l)"
            )
        self._known.add(region)

    def put(self, parts: Parts, *, is_pinned: bool = False) -> list[int]:
        """Store objects; return a code for each, 0 if it is there. ``is_pinned``: never evicted."""
        placement = self._pinned if is_pinned else self._placement
        with self._calling():
            codes = self._native.batch_put_from_multi_buffers(
                parts.names, parts.addresses, parts.sizes, placement
            )
        return _one_for_each(codes, len(parts))

    def get(self, parts: Parts, *, are_shorter: bool = False) -> list[int]:
        """Load objects; return each one's length, or a code below 0.

        ``are_shorter``: they may be shorter than their rooms, each of which has one part. When it
        returns, nothing writes to the buffers any more.

        A transfer that fails before its timeout got an answer: an owner that is gone, or is back
        without the object, refuses the connection or ends it. ``OWNER_IS_SILENT``: no answer came.
        """
        began = clock()
        with self._calling():
            codes = self._native_get(parts, are_shorter=are_shorter)
            took_s = clock() - began
            is_in_doubt = Code.TRANSFER_FAILED in codes and took_s >= _DOUBT_S
            if is_in_doubt:
                self._is_ending = True  # within the call: no new call may begin from now on
        if is_in_doubt:
            (self._has_ended if self._close_ends_transfers else _never).wait()
        if took_s >= self._silence_s:
            codes = [
                Code.OWNER_IS_SILENT if code == Code.TRANSFER_FAILED else code for code in codes
            ]
        return _one_for_each(codes, len(parts))

    def exist(self, names: Sequence[str]) -> list[int]:
        """Return for each object whether it exists: 1, 0, or a code below 0."""
        with self._calling():
            return _one_for_each(self._native.batch_is_exist(names), len(names))

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove objects, even while a lease lasts; return a code for each.

        A concurrent reader may get bytes of another object, which trailer and digest reveal.
        """
        with self._calling():
            return _one_for_each(self._native.batch_remove(names, True), len(names))  # noqa: FBT003 - forced

    def size(self, name: str) -> int:
        """Return an object's length, or a code below 0."""
        with self._calling():
            return self._native.get_size(name)

    def end(self) -> None:
        """Take no more calls, and close once the last one has left."""
        with self._lock:
            self._is_ending = True
            is_idle = self._calls == 0
        if is_idle:
            self._close()

    def wait_until_ended(self) -> None:
        """Wait until it is closed: forever, if a call never returns."""
        self._has_ended.wait()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        with self._lock:
            if self._is_ending:
                raise StoreFault("the client of the store is closed, or being closed")
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                is_last = self._is_ending and self._calls == 0
            if is_last:
                self._close()

    def _native_get(self, parts: Parts, *, are_shorter: bool) -> list[int]:
        if not are_shorter:
            return self._native.batch_get_into_multi_buffers(
                parts.names, parts.addresses, parts.sizes
            )
        addresses = [address for (address,) in parts.addresses]
        sizes = [size for (size,) in parts.sizes]
        return self._native.batch_get_into(parts.names, addresses, sizes)

    def _close(self) -> None:
        with self._lock:
            native, self._native_if_open = self._native_if_open, None
        if native is not None:
            native.close()
            # With SSD offload its destructor calls the master: now, not when that may be gone.
            del native
            self._has_ended.set()

    @property
    def _native(self) -> NativeStore:
        native = self._native_if_open
        assert native is not None  # until the last call has left
        return native


def _one_for_each(codes: list[int], count: int) -> list[int]:
    if len(codes) != count:
        raise StoreFault(f"the client gave {len(codes)} answers for {count} objects")
    return codes
