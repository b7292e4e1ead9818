"""The folder of a ``disk`` tier for ``kvtier ls``, ``fsck`` and ``purge``.

An engine that uses the folder is asked to purge it. Repairs, and purges without an engine, claim
the folder as an engine would.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from kvtier.errors import ConfigError
from kvtier.plugin_api.offline import (
    Contents,
    NamespaceBlocks,
    Offline,
    Removed,
    Selection,
    Verified,
)
from kvtier.plugin_api.options import Options
from kvtier.plugin_api.sizes import shown_age, shown_bytes
from kvtier_backends.disk.folder.claim import Claim, segment_numbers
from kvtier_backends.disk.format import NO_KEY_ID
from kvtier_backends.disk.offline.fsck import Checker, folder_damaged
from kvtier_backends.disk.offline.inspection import Folder, FolderDamaged, user_of
from kvtier_backends.disk.offline.listing import Kind, list_folder
from kvtier_backends.disk.offline.purge_requests import NotAnswered, ask_engine
from kvtier_backends.disk.offline.purging import RegionSelection, purge_folder
from kvtier_backends.encryption.keys import ENCRYPTION_KEY, read_keyring, refuse_missing_package

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvtier.plugin_api.progress import ShowProgress
    from kvtier_backends.disk.folder.users import User
    from kvtier_backends.disk.offline.fsck import Checked
    from kvtier_backends.disk.offline.listing import Listing
    from kvtier_backends.encryption.keys import Keyring

_OF_ANY_AGE_S: Final = 1 << 32
"""After any time that a table can name: a clock that ran ahead must not keep blocks."""


@dataclass
class KindBlocks(NamespaceBlocks):
    """The blocks of one kind: a namespace, an encryption key and a size of blocks."""

    key_id: str | None = None
    block_bytes: int = 0
    slots: int | None = None  #: None: removed blocks, of which no more is known
    regions: int | None = None

    @classmethod
    def of(cls, kind: Kind, blocks: int, **more: Any) -> KindBlocks:  # noqa: ANN401 - its fields
        """Return so many blocks of one kind."""
        key_id = None if kind.key_id == NO_KEY_ID else kind.key_id.hex()
        size = blocks * kind.block_bytes
        name = kind.namespace.hex()
        return cls(name, blocks, size, key_id=key_id, block_bytes=kind.block_bytes, **more)

    @override
    def figures(self) -> dict[str, Any]:
        names = ["namespace", "key_id", "block_bytes", "blocks", "bytes"]
        if self.slots is not None:
            names += ["slots", "regions", "oldest_s", "newest_s", "facts"]
        return {name: getattr(self, name) for name in names}


class DiskStorage(Offline):
    """The folder, opened for each call."""

    def __init__(self, path: str, keyring: Keyring | None = None) -> None:
        """``keyring``: decrypts blocks that are verified."""
        self.place = os.path.abspath(path)
        self._keyring = keyring

    @classmethod
    @override
    def at(cls, place: str) -> DiskStorage | None:
        if "://" in place:
            return None
        has_any = os.path.lexists(f"{place}/superblock") or segment_numbers(place)
        return cls(place) if has_any else None

    @classmethod
    @override
    def from_options(cls, options: Mapping[str, Any]) -> DiskStorage:
        reader = Options(options, "disk tier")
        return cls(reader.path("path"), _keyring_of(reader))

    @override
    def use_keys(self, key_file: str) -> None:
        options = {f"{ENCRYPTION_KEY}_file": key_file}
        self._keyring = _keyring_of(Options(options, "--encryption-key-file"))

    @property
    @override
    def users(self) -> str:
        user = user_of(self.place)
        return "" if user is None else f"which {user} is using"

    @override
    def list(self, progress: ShowProgress) -> Contents:
        with Folder(self.place) as folder:
            numbers = folder.files.numbers()
            with progress("looking at regions", len(numbers)) as bar:
                listing = list_folder(folder, numbers, bar.advance)
            figures = _in_use(listing.user) | {
                "in_use_by": None if listing.user is None else str(listing.user),
                "made_s": folder.superblock.created_s,
                "region_bytes": folder.superblock.region_bytes,
                "regions": dict(sorted(listing.regions.items())),
                "bytes_on_disk": listing.bytes_on_disk,
            }
        return Contents(_namespaces(listing), figures, _rows(figures), listing.is_complete)

    @override
    def verify(self, progress: ShowProgress, *, repair: bool) -> Verified:
        claim = self._claimed("fsck --repair") if repair else nullcontext()
        try:
            Folder(self.place)  # before the claim, which would make a folder and a lock file
        except FolderDamaged:
            with claim:
                return _verified(folder_damaged(self.place, repair=repair))
        with claim, Folder(self.place, writable=repair) as folder:
            numbers = folder.files.numbers()
            with progress("checking regions", len(numbers)) as bar:
                checker = Checker(folder, self._keyring, repair=repair)
                return _verified(checker.run(numbers, bar.advance))

    @override
    def refuse_selection(self, selection: Selection) -> None:
        if selection.dead:
            raise ConfigError(
                f"--dead: {self.place} is the folder of a disk tier, which evicts such blocks "
                "first. Leave it out."
            )

    @override
    def remove(self, selection: Selection, progress: ShowProgress, *, dry: bool) -> Removed:
        of_regions = RegionSelection(
            _OF_ANY_AGE_S if selection.before_s is None else int(selection.before_s),
            None if selection.namespace is None else bytes.fromhex(selection.namespace),
            selection.is_everything,
        )
        with Folder(self.place) as folder:  # a damaged one is refused before an engine is asked
            if dry:
                return _remove_here(folder, of_regions, progress, dry=True)
        asked = self._ask_engine(of_regions, progress)
        if asked is not None:
            return asked
        with self._claimed("purge"), Folder(self.place, writable=True) as folder:
            return _remove_here(folder, of_regions, progress, dry=False)

    def _ask_engine(self, selection: RegionSelection, progress: ShowProgress) -> Removed | None:
        """Let the engine remove the blocks; return None if there is no engine."""
        user = user_of(self.place)
        if user is None:
            return None
        try:
            with progress(f"asking {user}", None) as bar:
                answer = ask_engine(self.place, selection, lambda: bar.advance(1))
        except NotAnswered as error:
            return _removed({}, 0, by=str(user), error=str(error))
        if answer is None:
            return None
        rows, regions_failed = answer
        return _removed({Kind(*row[:3]): row[3] for row in rows}, regions_failed, by=str(user))

    @contextmanager
    def _claimed(self, command: str) -> Iterator[None]:
        """Claim the folder for this process. Raises ``ConfigError`` if an engine uses it."""
        path = self.place
        user = user_of(path)
        if user is not None:
            raise ConfigError(
                f"{path} is in use by {user}: {command} needs the folder for itself. "
                f"{user.remedy} first."
            )
        # The engine, which reads the blocks, judges who may plant some.
        claim = Claim(
            path, lambda remedy: ConfigError(f"{path} {remedy}"), allow_world_writable=True
        )
        try:
            yield
        finally:
            claim.release()


def _keyring_of(reader: Options) -> Keyring | None:
    """Return the keys that the options name, if any. Raises ``ConfigError``."""
    keyring = read_keyring(reader, ENCRYPTION_KEY)
    if keyring is not None:
        try:
            import cryptography  # noqa: F401, PLC0415 - an extra
        except ImportError:
            raise refuse_missing_package(reader, ENCRYPTION_KEY) from None
    return keyring


def _in_use(user: User | None) -> dict[str, Any]:
    return {"in_use": user is not None, "engine_pid": None if user is None else user.pid}


def _region_rows(regions: Mapping[str, int]) -> list[tuple[str, str]]:
    names = {case: case.removeprefix("region_").replace("_", " ") for case in regions}
    return [(f"regions: {names[case]}", f"{count:,}") for case, count in regions.items()]


# --- results ---


def _namespaces(listing: Listing) -> list[KindBlocks]:
    return [
        KindBlocks.of(
            holding.kind,
            holding.keys.count(),
            slots=holding.slots,
            regions=holding.regions,
            oldest_s=holding.oldest_s,
            newest_s=holding.newest_s,
            facts=holding.facts,
        )
        for holding in listing.holdings.values()
    ]


def _rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("in use", f"by {figures['in_use_by']}" if figures["in_use"] else "no"),
        ("made", f"{shown_age(figures['made_s'])} ago"),
        ("size on disk", shown_bytes(figures["bytes_on_disk"])),
        ("size of a region", shown_bytes(figures["region_bytes"])),
        *_region_rows(figures["regions"]),
    ]


def _verified(checked: Checked) -> Verified:
    regions = dict(sorted(checked.regions.items()))
    rows = [("sound blocks", f"{checked.blocks:,}")]
    if checked.blocks_unverified:
        rows.append(("encrypted blocks, not verified", f"{checked.blocks_unverified:,}"))
    if checked.blocks_skipped:
        rows.append(("blocks in use, skipped", f"{checked.blocks_skipped:,}"))
    return Verified(
        figures=_in_use(checked.user)
        | {
            "regions": regions,
            "blocks_sound": checked.blocks,
            "blocks_unverified": checked.blocks_unverified,
            "blocks_skipped": checked.blocks_skipped,
            "bytes_read": checked.bytes_read,
        },
        rows=[*rows, ("read", shown_bytes(checked.bytes_read)), *_region_rows(regions)],
        problems=[
            {"case": each.case, "region": each.region, "count": each.size, "what": each.what}
            for each in checked.problems
        ],
        problem_count=len(checked.problems),
        repaired=checked.repaired,
        advice="--repair drops unsound entries; an engine skips them as well.",
        remark=f"{checked.blocks_unverified:,} encrypted blocks were not verified: give their keys "
        "with --encryption-key-file."
        if checked.blocks_unverified
        else "",
        is_complete=checked.is_complete,
    )


def _remove_here(
    folder: Folder, selection: RegionSelection, progress: ShowProgress, *, dry: bool
) -> Removed:
    numbers = folder.files.numbers()
    with progress("looking at regions" if dry else "removing", len(numbers)) as bar:
        purged = purge_folder(folder, numbers, selection, bar.advance, dry=dry)
    blocks = {kind: keys.count() for kind, keys in purged.kinds.items()}
    return _removed(blocks, purged.regions_failed, is_complete=purged.is_complete)


def _removed(
    blocks: Mapping[Kind, int],
    regions_failed: int,
    *,
    by: str = "",
    error: str = "",
    is_complete: bool = True,
) -> Removed:
    left = f"{regions_failed:,} regions could not be read or changed." if regions_failed else ""
    return Removed(
        [KindBlocks.of(kind, count) for kind, count in sorted(blocks.items())],
        {"removed_by": by or None, "regions_failed": regions_failed, "error": error},
        left=f"Nothing is known to be removed: {error}" if error else left,
        by=by,
        is_known=not error,
        is_complete=is_complete,
    )
