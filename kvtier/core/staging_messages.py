"""Defines the messages of a tier that stands behind another program's primary tier.

That program moves blocks by jobs of its own, between its own slots and the tier. In between lie
kvtier's staging slots (``kvtier/engine/staged/staged_tier.py``): ``slots`` here are the program's,
``staging`` kvtier's own. None of these messages leaves the engine cell, except ``CopyBlocks`` and
``BlocksCopied``: to the thread that copies (``kvtier/hosts/copier.py``), and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvtier.core.wire import Message
from kvtier.plugin_api.keys import Key, RequestId  # noqa: TC001 - msgspec decodes by them

if TYPE_CHECKING:
    from collections.abc import Sequence


class SubmitLoad(Message, frozen=True, gc=False):
    """Load these blocks from the tier into these slots."""

    job: int
    request: RequestId
    keys: tuple[Key, ...]
    slots: tuple[int, ...]


class SubmitStore(Message, frozen=True, gc=False):
    """Store these blocks in the tier. The slots keep their bytes until the job has finished."""

    job: int
    request: RequestId
    keys: tuple[Key, ...]
    slots: tuple[int, ...]


class CopyBlocks(Message, frozen=True, gc=False):
    """Copy between slots and staging. Answered with BlocksCopied."""

    copy: int
    to_staging: bool
    slots: tuple[int, ...]
    staging: tuple[int, ...]


class BlocksCopied(Message, frozen=True, gc=False):
    """The copy has ended: its slots are not touched any more."""

    copy: int
    success: bool


class GiveUp(Message, frozen=True, gc=False):
    """Finish every job now. Only copies that have begun continue; they end soon."""


class DrainFinished(Message, frozen=True, gc=False):
    """Answered with the list of jobs Finished since the last one."""


class Finished(NamedTuple):
    """Outcome of a job. Its slots are no longer touched."""

    job: int
    is_load: bool
    failed: Sequence[Key]  #: the blocks that did not reach their destination
    succeeded: Sequence[Key]
    moved: int  #: how many blocks were read or written
