"""The protocol between ``kvtier ls``, ``fsck``, ``purge``, ``evict`` and a tier's storage.

These commands read storage without an engine, or beside engines that use it. They depend on no
storage technology: a third party registers a class under the entry-point group ``kvtier.offline``,
by the name of its tier type, and its storage is listed, verified and purged like any other. It is
separate from ``Backend``, since a command must start without an engine's libraries.

Results have named fields for the facts of all storage (blocks, bytes, namespaces); those of one
type are in ``figures``, for ``--json``, and in ``rows``, for readers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier.errors import ConfigError
from kvtier.plugin_api.keys import is_unnamed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtier.plugin_api.keys import Key
    from kvtier.plugin_api.progress import ShowProgress


@dataclass
class NamespaceBlocks:
    """The blocks of one namespace, found or removed. Times are seconds since 1970."""

    namespace: str
    blocks: int = 0
    bytes: int = 0  #: of blocks, and of their protection
    oldest_s: int | None = None  #: None: the storage does not say
    newest_s: int | None = None
    dead_blocks: int = 0  #: of unnamed weights: no engine that starts finds them
    dead_bytes: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)  #: empty: not known

    def add(self, key: Key | None, size: int, stored_s: float | None = None) -> None:
        """Add a block. ``key``: None if its name does not contain it."""
        self.blocks += 1
        self.bytes += size
        if key is not None and is_unnamed(key):
            self.dead_blocks += 1
            self.dead_bytes += size
        if stored_s is not None:
            self.oldest_s = min(int(stored_s), self.oldest_s or int(stored_s))
            self.newest_s = max(int(stored_s), self.newest_s or 0)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Set the facts in the namespace's description."""
        self.facts = facts

    def figures(self) -> dict[str, Any]:
        """Return its row of a report. Storage with more facts, or fewer, returns other columns."""
        return asdict(self)


class Selection(NamedTuple):
    """Selects the blocks to remove: those that match all of this."""

    namespace: str | None = None
    before_s: float | None = None  #: stored before that, in seconds since 1970
    dead: bool = False  #: of unnamed weights

    @property
    def are_whole_namespaces(self) -> bool:
        """Return whether it removes namespaces as a whole."""
        return self.before_s is None and not self.dead

    @property
    def is_everything(self) -> bool:
        """Return whether it removes everything, readable or not."""
        return self.are_whole_namespaces and self.namespace is None

    def has(self, namespace: str, key: Key | None, stored_s: float | None = None) -> bool:
        """Return whether a block is to be removed. ``key``, ``stored_s``: None if not known."""
        if self.namespace not in (None, namespace):
            return False
        if self.before_s is not None and (stored_s is None or stored_s >= self.before_s):
            return False
        return not self.dead or (key is not None and is_unnamed(key))


@dataclass(frozen=True)
class Contents:
    """Contents of storage."""

    namespaces: Sequence[NamespaceBlocks]
    figures: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[tuple[str, str]] = ()
    is_complete: bool = True  #: False: interrupted, and the rest was not counted


@dataclass(frozen=True)
class Verified:
    """Result of a check of all blocks."""

    figures: Mapping[str, Any]
    rows: Sequence[tuple[str, str]]
    problems: Sequence[Mapping[str, Any]]  #: each with ``case``, ``what``, and where it is
    problem_count: int  #: of all; ``problems`` may be the first ones
    repaired: int
    advice: str  #: what ``--repair`` does with them, and what an engine does
    remark: str = ""  #: what was not verified, and how it could be
    is_complete: bool = True


@dataclass(frozen=True)
class Removed:
    """Result of a removal, or of a dry run."""

    namespaces: Sequence[NamespaceBlocks]
    figures: Mapping[str, Any]
    left: str = ""  #: why something that was selected may still be there, as a sentence
    by: str = ""  #: who removed it, if another process did
    is_known: bool = True  #: False: ``left`` is all that is known
    is_complete: bool = True

    @classmethod
    def of_blocks(
        cls,
        gone: Iterable[NamespaceBlocks],
        failed: int,
        why: str = "",
        *,
        is_complete: bool = True,
    ) -> Removed:
        """Return the result of a removal block by block, of which ``failed`` did not succeed.

        ``why``: the reason of a failure, if it is known.
        """
        left = f"{failed:,} blocks could not be removed{why and f' ({why})'}." if failed else ""
        return cls([*gone], {"blocks_failed": failed}, left=left, is_complete=is_complete)


@dataclass(frozen=True)
class Shrunk:
    """Contents of storage before it was shrunk, and the blocks removed."""

    blocks: int
    bytes: int
    other_bytes: int  #: of files or objects that are not blocks
    blocks_removed: int
    bytes_removed: int
    blocks_failed: int  #: that could not be removed
    reason: str  #: of the last failure
    is_complete: bool

    @property
    def bytes_left(self) -> int:
        """Bytes left afterwards."""
        return self.bytes + self.other_bytes - self.bytes_removed


class Offline(ABC):
    """The storage of one tier, as seen by tools. Engines may be using it.

    Calls block, and come from one thread. They raise ``OSError`` or ``StoreFault`` for storage that
    fails, and ``ConfigError`` for operations that it does not offer. Ctrl-C ends a call early: it
    reports its work so far, with ``is_complete`` False, or lets ``KeyboardInterrupt`` pass.
    """

    place: str  #: the folder or the address, for people

    @classmethod
    @abstractmethod
    def at(cls, place: str) -> Offline | None:
        """Return the storage at ``place``, an existing folder or an address.

        None if that is not of this type. Raises ``OSError``, and ``ConfigError`` for an unusable
        address of this type.
        """

    @classmethod
    @abstractmethod
    def from_options(cls, options: Mapping[str, Any]) -> Offline:
        """Return the storage of a tier with these options, as they stand in ``secondary_tiers``.

        Raises ``ConfigError``.
        """

    def use_keys(self, key_file: str) -> None:  # noqa: ARG002 - for storage that decrypts
        """Have ``verify`` decrypt blocks with these encryption keys. Raises ``ConfigError``."""
        raise ConfigError(
            f"--encryption-key-file: no keys are needed to verify {self.place}, whose encrypted "
            "blocks are not decrypted. Leave it out."
        )

    @property
    def users(self) -> str:
        """Return who uses it now, as a clause such as ``"which process 12 is using"``, or ""."""
        return "which engines may be using"

    @abstractmethod
    def list(self, progress: ShowProgress) -> Contents:
        """Count the blocks by namespace."""

    def describe(self, progress: ShowProgress) -> Mapping[str, Mapping[str, Any]]:  # noqa: ARG002 - for those that can
        """Return the facts in each namespace's description, without reading any block.

        Raises ``ConfigError`` also if the storage does not let this user list it.
        """
        raise ConfigError(f"{self.place} can't list its namespaces without its blocks.")

    @abstractmethod
    def remove(self, selection: Selection, progress: ShowProgress, *, dry: bool) -> Removed:
        """Remove the selected blocks, so that nothing finds them; if ``dry``, count them."""

    def refuse_selection(self, selection: Selection) -> None:  # noqa: B027 - most can select by all
        """Raise ``ConfigError`` for a selection that this storage can't make, before all work."""

    def verify(self, progress: ShowProgress, *, repair: bool) -> Verified:  # noqa: ARG002 - for those that can
        """Read every block and compare it with its checksum; ``repair``: remove unsound ones."""
        raise ConfigError(
            f"{self.place} can't be verified from outside: an engine checks each block that it "
            "loads."
        )

    def shrink(self, capacity_bytes: int, progress: ShowProgress) -> Shrunk:  # noqa: ARG002 - as above
        """Remove the least recently used blocks until it holds no more than that."""
        raise ConfigError(
            f"{self.place} can't be shrunk from outside: it bounds itself. Lower the tier's own "
            "bound, or use kvtier purge."
        )


def unreadable(place: str, problem: OSError) -> ConfigError:
    """Return the refusal of a folder that can't be read or changed."""
    remedy = "Is the disk there, and sound?"
    if isinstance(problem, PermissionError):
        remedy = "Run this as the user that the engine runs as."
    return ConfigError(f"{place}: {problem.strerror or problem}. {remedy}")
