"""Reports, at a tier's start, namespaces of an older kvtier, whose block names cover fewer facts.

They are neither served nor overwritten any more: an operator has to remove them.
"""

from __future__ import annotations

import itertools
import os
import shlex
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.plugin_api.log import log
from kvtier_backends.fs.bound.eviction import walk_files
from kvtier_backends.fs.offline.inspection import FsFolder
from kvtier_backends.fs.open_root import names_in
from kvtier_backends.shared.namespaces import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvtier_backends.fs.layout import Layout

FILES_MAX: Final = 100_000
"""At most this many files are counted: more would not change anyone's decision."""

NAMING: Final = "format"
"""The fact that grows when block names cover more facts, or the blocks' bytes change meaning."""


def neighbours(root: int, layout: Layout) -> list[str]:
    """Return the names of this model's other namespaces in an open root. Raises ``OSError``.

    Only lists the folder: few have other namespaces, and a thread that reads their files may hang.
    """
    names = names_in(root)
    model = layout.base_name.rpartition("_")[0]
    ours = (name for name in names if name.rpartition("_")[0] == model)
    return sorted(name for name in ours if name != layout.base_name)


def report_older(
    root: str, layout: Layout, names: Sequence[str], tier_name: str, keep_on: Callable[[], bool]
) -> None:
    """Log a warning for each of these namespaces that an older kvtier has left in ``root``.

    Walks their folders: call it in a thread of its own. Ends early once ``keep_on()`` is false.
    """
    own = facts_of(layout.config)
    # The folder may be disappearing, or its storage failing: then there is nothing to report.
    with suppress(ConfigError, OSError), FsFolder(root) as folder:
        for name in names:
            if _is_older(facts_of(folder.namespaces.get(name, {})), own):
                _report(folder, name, tier_name, keep_on)


def _is_older(found: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    there, here = found.get(NAMING), own.get(NAMING)
    is_older = isinstance(there, int) and isinstance(here, int) and there < here
    return is_older and found.get("model_name") == own.get("model_name")


def _report(folder: FsFolder, name: str, tier_name: str, keep_on: Callable[[], bool]) -> None:
    files = walk_files(folder.root, name, 1, keep_on)
    sizes = [status.st_size for _, status in itertools.islice(files, FILES_MAX)]
    digest = name.rpartition("_")[2]
    at_least = "at least " if len(sizes) == FILES_MAX else ""
    log.warning(
        "fs tier: an older kvtier has stored blocks here whose names do not identify their "
        "weights. This one does not serve them; remove them once no older engine uses them",
        tier=tier_name,
        folder=os.path.join(folder.path, name),
        bytes=f"{at_least}{sum(sizes):,}",
        remove=shlex.join(["kvtier", "purge", folder.path, "--namespace", digest]),
    )
