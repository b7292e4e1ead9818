"""Stores a namespace's description as an object beside its blocks: written once, then compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvtier.errors import StoreFault
from kvtier_backends.mooncake.client import Parts
from kvtier_backends.mooncake.library import ABSENT_CODES, MASTER_CODES, told
from kvtier_backends.mooncake.registered import DESCRIPTION_ROOM_BYTES, address_of
from kvtier_backends.shared.namespaces import OwnDescription

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import BackendContext
    from kvtier_backends.mooncake.client import StoreClient
    from kvtier_backends.mooncake.registered import RegisteredMemory

FORMAT_NAME: Final = "kvtier mooncake"
FORMAT_VERSION: Final = 1
OBJECT_NAME: Final = "namespace.json"


class NamespaceObject:
    """The description of one engine's namespace in a store."""

    def __init__(self, prefix: str, context: BackendContext, memory: RegisteredMemory) -> None:
        """``prefix``: the start of the names of all its objects."""
        self._name = prefix + OBJECT_NAME
        self._own = OwnDescription(
            self._name, FORMAT_NAME, FORMAT_VERSION, context, option="key_prefix"
        )
        self._room = memory.description_room
        self._is_settled = False

    @property
    def is_settled(self) -> bool:
        """Whether the last comparison found it, or wrote it."""
        return self._is_settled

    def compare(self, client: StoreClient) -> None:
        """Write it if it is missing, and compare it otherwise.

        Raises ``OtherNamespace`` if the two differ, and ``StoreFault`` if the master does not
        answer. An unreadable one, for example because its owner has died, does not rule out
        the store: the name of each block includes the facts, too.
        """
        self._is_settled = False
        found = self._read(client)
        if found is None:
            self._is_settled = self._write(client)
            return
        self._own.refuse_other_untrusted(found)
        self._is_settled = True

    def _read(self, client: StoreClient) -> memoryview | None:
        size = client.size(self._name)
        _refuse_lost_master(size)
        if size in ABSENT_CODES:
            return None
        if size < 0 or size > DESCRIPTION_ROOM_BYTES:
            raise self._own.no_description(f"{size} bytes")
        room = self._room[:size]
        (code,) = client.get(Parts([(self._name, [address_of(room)], [size])]))
        _refuse_lost_master(code)
        return room if code == size else None

    def _write(self, client: StoreClient) -> bool:
        if self._own.is_read_only or len(self._own.text) > DESCRIPTION_ROOM_BYTES:
            return True  # for people only: block names distinguish namespaces
        room = self._room[: len(self._own.text)]
        room[:] = self._own.text
        part = (self._name, [address_of(room)], [len(room)])
        (code,) = client.put(Parts([part]), is_pinned=True)
        _refuse_lost_master(code)
        return code == 0


def _refuse_lost_master(code: int) -> None:
    if code in MASTER_CODES:
        raise StoreFault(f"the master of the store did not answer: {told(code)}")
