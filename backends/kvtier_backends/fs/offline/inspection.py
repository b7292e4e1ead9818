"""Inspects the folder of an ``fs`` tier, kvtier's own or vLLM's, even while it is in use."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import ConfigError
from kvtier_backends.fs.bound.eviction import BLOCK_SUFFIXES, walk_files
from kvtier_backends.fs.bound.protocol import (
    LEASE,
    SPACE,
    TERMS,
    Lease,
    RecordDamaged,
    decode_untrusted,
    leaf_number,
    term_numbers,
)
from kvtier_backends.fs.layout import FORMAT, FORMAT_VERSION
from kvtier_backends.fs.open_root import CONFIG_NAME
from kvtier_backends.shared.compression import COMPRESSION
from kvtier_backends.shared.namespaces import (
    DESCRIPTION_BYTES_MAX,
    DescriptionDamaged,
    facts_of,
    parse_description_untrusted,
)
from kvtier_backends.shared.protected_records import PROTECTION
from kvtier_backends.shared.record_trailer import Form

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Any, Self

LAYOUT_OF_KVTIER: Final = f"{FORMAT} {FORMAT_VERSION}"
LAYOUT_OF_VLLM: Final = "vLLM's own"
_ROOT_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class BlockFile(NamedTuple):
    """One block file. Times are seconds since 1970, by the server's clock or a client's."""

    namespace: str  #: the folder below the root
    name: str  #: below that
    size: int  #: bytes
    stored_s: float

    @property
    def path(self) -> str:
        """The file, below the root."""
        return f"{self.namespace}/{self.name}"


class FsFolder:
    """The open root of an ``fs`` tier. Calls raise ``OSError``."""

    def __init__(self, path: str) -> None:
        """Open the folder. Raises ``ConfigError`` if it is not an ``fs`` tier's."""
        self.path = os.path.abspath(path)
        try:
            self.root = os.open(path, _ROOT_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(f"{path} is not a folder. Name the root_dir of an fs tier.") from None
        try:
            self.namespaces = {name: self._describe(name) for name in self._folders()}
            is_ours = bool(self.namespaces) or os.path.isdir(f"{path}/{SPACE}")
        except BaseException:
            os.close(self.root)
            raise
        if not is_ours:
            os.close(self.root)
            raise ConfigError(
                f"{path} is not the folder of an fs tier: nothing in it has a config.json. Name "
                "the tier's root_dir."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.root)

    def parts(self) -> int:
        """Count the folders below the namespaces: names of blocks are spread evenly over them."""
        count = 0
        for name in os.listdir(self.root):
            if name != SPACE:
                with suppress(OSError), os.scandir(f"{self.path}/{name}") as entries:
                    count += sum(entry.is_dir(follow_symlinks=False) for entry in entries)
        return count

    def walk(self, advance: Callable[[], None]) -> Iterator[tuple[str, os.stat_result]]:
        """Yield all files but those of the protocol. ``advance``: called for each of the parts."""
        part = ""
        for path, status in walk_files(self.root, "", 0, lambda: True):
            above, _, _ = path.rpartition("/")
            if not above.startswith(part or "/"):
                part = "/".join(above.split("/")[:2])
                advance()
            yield path, status

    def files(self, advance: Callable[[], None] = lambda: None) -> Iterator[BlockFile | int]:
        """Yield all block files, and the bytes of each other file. ``advance``: see ``walk``."""
        for path, status in self.walk(advance):
            namespace, _, name = path.partition("/")
            leaf = leaf_number(namespace, name.rpartition("/")[0])
            if leaf is None or not name.endswith(BLOCK_SUFFIXES):
                yield status.st_size
            else:
                yield BlockFile(namespace, name, status.st_size, status.st_mtime)

    def remove(self, file: BlockFile) -> bool:
        """Remove a block file. Returns False if it was gone. Open readers read it to its end."""
        try:
            os.unlink(file.path, dir_fd=self.root)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def read(self, file: BlockFile) -> bytes | None:
        """Return a block file's bytes, None if it is gone."""
        try:
            descriptor = os.open(file.path, _READ_FLAGS, dir_fd=self.root)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as opened:
            return opened.read()

    def lease(self) -> Lease | None:
        """Return the lease of the last cleaner, None if there was none."""
        terms = f"{self.path}/{SPACE}/{TERMS}"
        with suppress(OSError, RecordDamaged, IndexError):
            number = term_numbers(os.listdir(terms))[-1]
            with open(f"{terms}/{number:010d}/{LEASE}", "rb") as file:
                return decode_untrusted(file.read(DESCRIPTION_BYTES_MAX), Lease)
        return None

    def _folders(self) -> list[str]:
        """Return the namespaces: folders with a description, and vLLM's rank folders beside one."""
        names = [name for name in os.listdir(self.root) if name != SPACE]
        described = {name for name in names if os.path.isfile(f"{self.path}/{name}/{CONFIG_NAME}")}
        return sorted(
            name for name in names if name in described or name.rpartition("_r")[0] in described
        )

    def _describe(self, name: str) -> dict[str, Any]:
        """Return a namespace's description; an empty one if it cannot be read."""
        for each in (name, name.rpartition("_r")[0]):
            path = f"{self.path}/{each}/{CONFIG_NAME}"
            with suppress(OSError, DescriptionDamaged), open(path, "rb") as file:
                return parse_description_untrusted(file.read(DESCRIPTION_BYTES_MAX))
        return {}


def is_fs_folder(path: str) -> bool:
    """Return whether the folder looks like that of an ``fs`` tier. Raises nothing."""
    try:
        with FsFolder(path):
            return True
    except (ConfigError, OSError):
        return False


def block_bytes_of(description: dict[str, Any]) -> int | None:
    """Return the size of a namespace's blocks, None if its description lacks it."""
    found = description.get("block_bytes")
    is_ours = description.get("format") == FORMAT
    return found if is_ours and isinstance(found, int) and found > 0 else None


def format_of(description: dict[str, Any]) -> str:
    """Return the format and version that a namespace was written in, in words."""
    if not description:
        return "no readable config.json"
    if "format" not in description:
        return LAYOUT_OF_VLLM
    return f"{description['format']} {description.get('format_version')}"


def form_of(description: dict[str, Any]) -> Form:
    """Return the form of a namespace's blocks."""
    how = facts_of(description).get(PROTECTION)
    return {"signed": Form.SIGNED, "encrypted": Form.ENCRYPTED}.get(str(how), Form.PLAIN)


def are_compressed(description: dict[str, Any]) -> bool:
    """Return whether a namespace's blocks may be compressed."""
    return COMPRESSION in facts_of(description)
