"""Looks whether a tier could have a folder, and changes nothing: for ``kvtier check``."""

from __future__ import annotations

import os
import stat


def fault_of_folder(path: str) -> str | None:
    """Return why ``path`` can't be a tier's folder, with the remedy; None if it can. One user's.

    A folder that is missing is looked for upwards: it will be made. May hang where storage does.
    """
    try:
        above, found = nearest(path)
    except NotADirectoryError:
        return "lies below something that is not a folder. Name a folder."
    except OSError as problem:
        return (
            f"cannot be used ({problem.strerror}). Give this user the right to write there, or "
            "name another folder."
        )
    if not stat.S_ISDIR(found.st_mode):
        what = "is not a folder" if above == path else "lies below something that is not a folder"
        return f"{what}. Name a folder."
    if above == path and found.st_mode & stat.S_IWOTH:
        return (
            "is open to planted blocks: anyone may write there. Run chmod o-w on it, or name a "
            "folder of this user's own."
        )
    # In a new file's place, and as who an engine would be: this process.
    if not os.access(above, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        read_only = os.statvfs(above).f_flag & os.ST_RDONLY
        why = "its filesystem is read-only" if read_only else "this user may not write there"
        return (
            f"cannot be {'written' if above == path else f'created in {above}'} ({why}). Give this "
            "user the right to, or name another folder."
        )
    return None


def nearest(path: str) -> tuple[str, os.stat_result]:
    """Return what is there of a path: itself, or the nearest folder above it.

    Raises ``OSError``.
    """
    try:
        return path, os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path) or os.path.dirname(path) == path:
            raise
        return nearest(os.path.dirname(path))
