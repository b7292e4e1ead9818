"""Defines the messages between a secondary tier and the driver of its backend.

Keys are the backend's here: they contain the mark of their generation
(``kvtier/core/generations.py``). ``deadline``: when no request waits for the batch any more.
"""

from __future__ import annotations

from kvtier.core.wire import Message
from kvtier.plugin_api.backend import Outcome  # noqa: TC001 - msgspec reads it
from kvtier.plugin_api.deadlines import NEVER
from kvtier.plugin_api.keys import Key, RequestId  # noqa: TC001 - msgspec decodes by them


class ProbeBatch(Message, frozen=True, gc=False):
    """Look these keys up in the backend."""

    batch: int
    keys: tuple[Key, ...]
    request: RequestId = ""  #: the one it is for, if lookups are request-scoped
    deadline: float = NEVER


class LoadBatch(Message, frozen=True, gc=False):
    """Have the backend read these. ``request``: of the first key; of all if request-scoped."""

    batch: int
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    request: RequestId = ""
    deadline: float = NEVER


class StoreBatch(Message, frozen=True, gc=False):
    """Have the backend store these, after it has removed ``remove``. ``request``: as above."""

    batch: int
    keys: tuple[Key, ...]
    slots: tuple[int, ...]
    remove: tuple[Key, ...]
    request: RequestId = ""
    deadline: float = NEVER


class RemoveBatch(Message, frozen=True, gc=False):
    """Have the backend remove these, whether it has them or not."""

    batch: int
    keys: tuple[Key, ...]


class AnnounceContents(Message, frozen=True, gc=False):
    """Pass on ``keys``, or if there are none the blocks that the backend had when it was opened.

    Slowly, with ContentsFound: the engine takes them in besides its work.
    """

    keys: tuple[Key, ...]


class ContentsFound(Message, frozen=True, gc=False):
    """The backend had these when it was opened: blocks once stored together, head to tail.

    ``again``: the tier tracked them before, as blocks of another generation.
    """

    keys: tuple[Key, ...]
    again: bool = False


class ContentsAnnounced(Message, frozen=True, gc=False):
    """The tier now tracks all blocks that the backend had when it was opened."""


class ContentsLost(Message, frozen=True, gc=False):
    """The backend no longer has these, for reasons of its own."""

    keys: tuple[Key, ...]


class BatchEnded(Message, frozen=True, gc=False):
    """One outcome per key. For a probe DONE means present, for a removal gone.

    ``at``: when it ended, by the monotonic clock of the machine; 0.0: not known.
    """

    batch: int
    outcomes: tuple[Outcome, ...]
    seconds: float
    at: float = 0.0
