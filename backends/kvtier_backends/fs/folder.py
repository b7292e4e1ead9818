"""Prepares the folders of a namespace, or refuses them while the engine starts."""

from __future__ import annotations

import errno
import json
import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError, NamespaceMismatch
from kvtier.plugin_api.options import shown
from kvtier_backends.fs.open_root import CONFIG_NAME, FOLDER_FLAGS, OpenRoot, refuse_special_file
from kvtier_backends.fs.temporary import MARKERS_NAME, temporary_path, this_writer
from kvtier_backends.posix import (
    NO_FOLDER,
    NO_ROOM,
    NOT_A_FOLDER,
    NOTHING_OF_OURS,
    O_DIRECT,
    fault_of_rights,
    is_elsewhere,
    make_folders,
    unusable,
    world_writable,
)
from kvtier_backends.shared.namespaces import (
    DESCRIPTION_BYTES_MAX,
    DescriptionDamaged,
    first_difference,
    parse_description_untrusted,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier_backends.fs.layout import Layout


class FolderRefusal:
    """Builds the refusals of one tier's ``root_dir``."""

    def __init__(self, tier_name: str, root: str) -> None:
        self._tier_name = tier_name
        self._root = root

    def error(self, remedy: str) -> ConfigError:
        """Return the refusal, with the key, its value and the remedy."""
        return ConfigError(f"{self._text()} {remedy}")

    def mismatch(self, remedy: str) -> NamespaceMismatch:
        """Return the refusal of a folder that holds other blocks."""
        return NamespaceMismatch(f"{self._text()} {remedy}")

    def _text(self) -> str:
        return f"secondary tier {self._tier_name}: root_dir={shown(self._root)}"


def refuse_bare_mount_point(layout: Layout, filesystem: int | None, refusal: FolderRefusal) -> None:
    """Refuse a folder that a restarted tier finds on another filesystem, unless it is its own.

    ``filesystem``: the device number that the tier has used; None at an engine's start.
    """
    try:
        if is_elsewhere(layout.base, filesystem) and not os.path.lexists(layout.config_path):
            raise refusal.error(NOTHING_OF_OURS)
    except OSError as problem:
        raise refusal.error(f"cannot be looked at ({problem.strerror}).") from problem


def prepare_root(
    root: str,
    refusal: FolderRefusal,
    *,
    allow_world_writable: bool = False,
    read_only: bool = False,
) -> OpenRoot:
    """Create ``root`` for this user alone, or check that it is usable; and open it."""
    try:
        if not read_only:
            make_folders(root)
        place = OpenRoot(root, allow_world_writable=allow_world_writable, read_only=read_only)
    except (FileExistsError, NotADirectoryError):
        raise refusal.error(NOT_A_FOLDER) from None
    except OSError as problem:
        if read_only and isinstance(problem, FileNotFoundError):
            raise refusal.error(NO_FOLDER) from problem
        raise refusal.error(unusable(problem, "cannot be created")) from problem
    if place.is_open_to_all(place.root):
        raise refusal.error(world_writable(root))
    return place


def prepare_namespace(place: OpenRoot, layout: Layout, refusal: FolderRefusal) -> None:
    """Create the namespace's folders and ``config.json``, or compare them with existing ones."""
    try:
        try:
            place.open_below(layout, make=not place.read_only)
        except FileNotFoundError:
            if place.read_only:
                return  # others will create it: each check looks for it
            raise
        for folder, path in ((place.base, layout.base), (place.blocks, layout.blocks)):
            _refuse_unfit(place, folder, path, refusal)
        if not place.read_only:
            with suppress(FileNotFoundError):  # no writes here yet
                _refuse_foreign_markers(place, layout, refusal)
            if place.written_ns() is None:
                write_config(place.base, layout)
    except NotADirectoryError as problem:
        raise refusal.error(f"holds {problem.filename}, which is not a folder. Move it.") from None
    except OSError as problem:
        fault = unusable(problem, "cannot be written", str(problem.filename or ""))
        raise refusal.error(fault) from problem
    compare_config(place, layout, refusal)


def compare_config(place: OpenRoot, layout: Layout, refusal: FolderRefusal) -> None:
    """Refuse a namespace whose ``config.json`` differs. Raises ``ConfigError``."""
    _compare(_read_config_untrusted(place.base, layout.config_path, refusal), layout, refusal)


def refuse_other_config(place: OpenRoot, layout: Layout) -> None:
    """Compare with a namespace that others have created meanwhile. Raises ``OSError``."""
    try:
        compare_config(place, layout, FolderRefusal("", layout.base))
    except ConfigError as refused:
        raise OSError(errno.ESTALE, str(refused), layout.config_path) from refused


def write_config(base: int, layout: Layout) -> None:
    """Write ``config.json`` in one step, in the same format as vLLM's. Raises ``OSError``."""
    temporary = temporary_path(CONFIG_NAME, this_writer())
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, layout.file_mode, dir_fd=base)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(layout.config, file, indent=2, sort_keys=True)
        os.replace(temporary, CONFIG_NAME, src_dir_fd=base, dst_dir_fd=base)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=base)
        raise


def probe_direct(place: OpenRoot, refusal: FolderRefusal, *, wanted: bool) -> bool:
    """Check that files can be written, and return whether O_DIRECT works there.

    A full disk is not refused: its blocks can still be served. A read-only place is probed with
    ``config.json``, if that exists.
    """
    if place.read_only:
        return wanted and _reads_direct(place)
    name = temporary_path(".probe", this_writer())
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        for extra in (O_DIRECT, 0) if wanted and O_DIRECT else (0,):
            try:
                _write_page(name, flags | extra, place.blocks)
            except OSError as problem:
                if problem.errno in NO_ROOM:
                    return bool(extra)
                if not extra:
                    raise
            else:
                return bool(extra)
    except OSError as problem:
        raise refusal.error(unusable(problem, "cannot be written")) from problem
    finally:
        with suppress(OSError):
            os.unlink(name, dir_fd=place.blocks)
    return False


def _reads_direct(place: OpenRoot) -> bool:
    try:
        os.close(os.open(CONFIG_NAME, os.O_RDONLY | O_DIRECT | os.O_CLOEXEC, dir_fd=place.base))
    except OSError:
        return False
    return True


def _write_page(name: str, flags: int, folder: int) -> None:
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:
            os.write(descriptor, page)
    finally:
        os.close(descriptor)


def _refuse_unfit(place: OpenRoot, folder: int, path: str, refusal: FolderRefusal) -> None:
    """Refuse a folder that anyone may write to, or that this user may not."""
    if place.is_open_to_all(folder):
        raise refusal.error(world_writable(path))
    fault = fault_of_rights(folder, path, read_only=place.read_only)
    if fault is not None:
        raise refusal.error(fault)


def _refuse_foreign_markers(place: OpenRoot, layout: Layout, refusal: FolderRefusal) -> None:
    """Refuse a namespace whose markers' folder is another user's alone. Raises ``OSError``."""
    markers = os.open(MARKERS_NAME, FOLDER_FLAGS, dir_fd=place.base)
    try:
        _refuse_unfit(place, markers, f"{layout.base}/{MARKERS_NAME}", refusal)
    finally:
        os.close(markers)


def _read_config_untrusted(base: int, path: str, refusal: FolderRefusal) -> dict[str, Any]:
    """Return the mapping in ``config.json``. Raises ``ConfigError`` and nothing else."""
    try:
        # O_NONBLOCK: a FIFO here must not block the engine's start.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(CONFIG_NAME, flags, dir_fd=base)
        try:
            refuse_special_file(descriptor, path)
            raw = os.read(descriptor, DESCRIPTION_BYTES_MAX)
        finally:
            os.close(descriptor)
        return parse_description_untrusted(raw)
    except (OSError, DescriptionDamaged) as problem:
        reason = str(problem)
    raise refusal.error(
        f"has an unreadable {path} ({reason}). If the blocks beside it may go, remove its "
        "folder; otherwise restore the file or name another root_dir."
    )


def _compare(found: Mapping[str, Any], layout: Layout, refusal: FolderRefusal) -> None:
    difference = first_difference(found, layout.config)
    if difference is not None:
        name, there, here = difference
        raise refusal.mismatch(
            f"holds other blocks: in {layout.config_path}, {name} is {there!r}, and this engine "
            f"has {here!r}. Name another root_dir, or remove that folder."
        )
