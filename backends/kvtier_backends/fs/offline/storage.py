"""Implements ``kvtier ls`` and its like for the folder of an ``fs`` tier, kvtier's or vLLM's.

Each block is a file, and engines may be using the folder: a block that is removed is a miss.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from kvtier.errors import ConfigError
from kvtier.plugin_api.offline import Contents, NamespaceBlocks, Offline, Removed, Verified
from kvtier.plugin_api.options import Options
from kvtier.plugin_api.sizes import shown_bytes
from kvtier_backends.fs.layout import key_of_file_untrusted
from kvtier_backends.fs.offline.checking import check_folder
from kvtier_backends.fs.offline.evicting import announce, evict_to
from kvtier_backends.fs.offline.inspection import BlockFile, FsFolder
from kvtier_backends.posix import clock_ahead_s
from kvtier_backends.shared.namespaces import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvtier.plugin_api.offline import Selection, Shrunk
    from kvtier.plugin_api.progress import ShowProgress

_ANNOUNCED_AT_ONCE: Final = 1024


class FsStorage(Offline):
    """The folder, opened for each call."""

    def __init__(self, path: str) -> None:
        self.place = os.path.abspath(path)

    @classmethod
    @override
    def at(cls, place: str) -> FsStorage | None:
        if "://" in place:
            return None
        try:
            with FsFolder(place):
                return cls(place)
        except ConfigError:
            return None

    @classmethod
    @override
    def from_options(cls, options: Mapping[str, Any]) -> FsStorage:
        return cls(Options(options, "fs tier").path("root_dir"))

    @override
    def list(self, progress: ShowProgress) -> Contents:
        with FsFolder(self.place) as folder:
            held = {
                name: NamespaceBlocks(name, facts=facts_of(description))
                for name, description in folder.namespaces.items()
            }
            others = 0
            is_complete = False
            parts = folder.parts()
            with suppress(KeyboardInterrupt), progress("looking at blocks", parts) as bar:
                for file in folder.files(bar.advance):
                    if isinstance(file, BlockFile):
                        _add(held, file)
                    else:
                        others += file
                is_complete = True
            lease = folder.lease()
        blocks = sum(each.blocks for each in held.values())
        size = sum(each.bytes for each in held.values())
        capacity = None if lease is None else lease.capacity
        cleaner = None if lease is None or lease.released else lease.holder
        return Contents(
            [*held.values()],
            {"capacity_bytes": capacity, "cleaner": cleaner, "other_bytes": others},
            (
                ("capacity", "-" if capacity is None else shown_bytes(capacity)),
                ("cleaned by", cleaner or "-"),
                ("blocks", f"{blocks:,}"),
                ("size of blocks", shown_bytes(size)),
                ("size of other files", shown_bytes(others)),
            ),
            is_complete,
        )

    @override
    def verify(self, progress: ShowProgress, *, repair: bool) -> Verified:
        with FsFolder(self.place) as folder, progress("checking blocks", folder.parts()) as bar:
            checked = check_folder(folder, bar.advance, repair=repair)
        return Verified(
            figures={
                "blocks_sound": checked.blocks,
                "blocks_unverified": checked.unverified,
                "blocks_skipped": checked.skipped,
                "bytes_read": checked.bytes_read,
                "cases": dict(checked.cases),
            },
            rows=(
                ("sound blocks", f"{checked.blocks:,}"),
                ("blocks without a checksum, not verified", f"{checked.unverified:,}"),
                ("blocks removed meanwhile, skipped", f"{checked.skipped:,}"),
                ("read", shown_bytes(checked.bytes_read)),
            ),
            problems=[problem._asdict() for problem in checked.problems],
            problem_count=sum(checked.cases.values()),
            repaired=checked.repaired,
            advice="--repair removes damaged blocks; an engine removes one when it tries to load "
            "it.",
            is_complete=checked.is_complete,
        )

    @override
    def remove(self, selection: Selection, progress: ShowProgress, *, dry: bool) -> Removed:
        with FsFolder(self.place) as folder:
            selection = self._by_its_clock(selection)
            removal = _Removal(folder, dry=dry)
            is_complete = False
            label = "looking at blocks" if dry else "removing"
            with suppress(KeyboardInterrupt), progress(label, folder.parts()) as bar:
                removal.run(selection, bar.advance)
                is_complete = True
        gone, failed, why = removal.gone.values(), removal.failed, removal.why
        return Removed.of_blocks(gone, failed, why, is_complete=is_complete)

    @override
    def shrink(self, capacity_bytes: int, progress: ShowProgress) -> Shrunk:
        with FsFolder(self.place) as folder:
            return evict_to(folder, capacity_bytes, progress)

    def _by_its_clock(self, selection: Selection) -> Selection:
        """Return the selection with its time by the clock of the folder's server."""
        if selection.before_s is not None:
            with suppress(OSError):  # it can't be written: nothing is removed there either
                ahead_s = clock_ahead_s(self.place)
                return selection._replace(before_s=selection.before_s + ahead_s)
        return selection


class _Removal:
    """Removes blocks and announces them, batch by batch, to engines that bound the folder."""

    def __init__(self, folder: FsFolder, *, dry: bool) -> None:
        self.gone: dict[str, NamespaceBlocks] = {}
        self.failed = 0
        self.why = ""  #: the reason of the last failure
        self._folder = folder
        self._dry = dry
        self._names: list[str] = []

    def run(self, selection: Selection, advance: Callable[[], None]) -> None:
        """Remove the selected blocks. Ctrl-C is raised once the removed ones are announced."""
        try:
            for file in self._selected(selection, advance):
                self._remove(file)
                if len(self._names) >= _ANNOUNCED_AT_ONCE:
                    self._announce()
        finally:
            self._announce()

    def _selected(self, selection: Selection, advance: Callable[[], None]) -> Iterator[BlockFile]:
        for file in self._folder.files(advance):
            if isinstance(file, BlockFile) and selection.has(
                file.namespace, key_of_file_untrusted(file.name), file.stored_s
            ):
                yield file

    def _remove(self, file: BlockFile) -> None:
        try:
            is_removed = self._dry or self._folder.remove(file)
        except OSError as problem:
            self.failed += 1
            self.why = problem.strerror or str(problem)
            return
        if is_removed:
            _add(self.gone, file)
            if not self._dry:
                self._names.append(file.path)

    def _announce(self) -> None:
        announce(self._folder, self._names)
        self._names.clear()


def _add(held: dict[str, NamespaceBlocks], file: BlockFile) -> None:
    blocks = held.setdefault(file.namespace, NamespaceBlocks(file.namespace))
    blocks.add(key_of_file_untrusted(file.name), file.size, file.stored_s)
