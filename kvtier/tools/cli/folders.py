"""What the commands on folders (``ls``, ``fsck``, ``purge``) have in common."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.tools.answering import check_answers
from kvtier.tools.cli.terminal import check_can_write, write_json
from kvtier_backends.disk.folder.claim import Claim
from kvtier_backends.disk.format import NO_KEY_ID
from kvtier_backends.disk.offline.inspection import refusal, user_of
from kvtier_backends.fs.offline.inspection import is_fs_folder as is_fs_folder

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Mapping

    from kvtier_backends.disk.offline.listing import Kind

DIGITS_SHOWN: Final = 12
_UNITS: Final = (("d", 86_400), ("h", 3600), ("min", 60))
_GIB: Final = 1 << 30


@contextmanager
def refusing(path: str) -> Iterator[None]:
    """Turn an ``OSError`` about the folder into a ``ConfigError`` that names it."""
    try:
        yield
    except OSError as problem:
        raise refusal(path, problem) from problem


@contextmanager
def claimed(path: str, command: str) -> Iterator[None]:
    """Have the folder for this process alone. Raises ``ConfigError`` if an engine uses it."""
    with refusing(path):
        user = user_of(path)
    if user is not None:
        raise ConfigError(
            f"{path} is in use by {user}: {command} needs the folder for itself. "
            f"{user.remedy} first."
        )
    # Who may plant blocks is for the engine to judge, which reads them.
    claim = Claim(path, lambda remedy: ConfigError(f"{path} {remedy}"), allow_world_writable=True)
    try:
        yield
    finally:
        claim.release()


def check(arguments: argparse.Namespace) -> None:
    """Raise ``Misuse`` now if the figures cannot be written later, or the storage hangs."""
    if arguments.json and arguments.json != "-":
        check_can_write(arguments.json)
    check_answers(arguments.path)


def report(
    arguments: argparse.Namespace, figures: dict[str, Any], show: Callable[[dict[str, Any]], None]
) -> None:
    """Show the figures to people, and write them where ``--json`` says, if it was given."""
    if arguments.json == "-":
        print(json.dumps(figures, indent=2, allow_nan=False))
        return
    show(figures)
    if arguments.json:
        write_json(arguments.json, figures)
        print(f"Figures: {arguments.json}")


def kind_figures(kind: Kind, blocks: int) -> dict[str, Any]:
    """Return what a report says of so many blocks of one kind."""
    return {
        "namespace": kind.namespace.hex(),
        "key_id": None if kind.key_id == NO_KEY_ID else kind.key_id.hex(),
        "block_bytes": kind.block_bytes,
        "blocks": blocks,
        "bytes": blocks * kind.block_bytes,
    }


KIND_COLUMNS: Final = ("namespace", "key id", "block bytes", "blocks", "GiB")


def kind_row(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ``KIND_COLUMNS`` of what ``kind_figures`` returned."""
    return (
        short(figures["namespace"]),
        short(figures["key_id"]),
        f"{figures['block_bytes']:,}",
        f"{figures['blocks']:,}",
        gib(figures["bytes"]),
    )


def short(digest: str | None) -> str:
    """Return as much of a digest as people compare by eye."""
    return "-" if digest is None else digest[:DIGITS_SHOWN]


def gib(size: int) -> str:
    """Return a size in GiB, with more digits where it is small."""
    return f"{size / _GIB:,.1f}" if size >= _GIB else f"{size / _GIB:.4f}"


def age(stored_s: int | None) -> str:
    """Return how long ago a time was, in the largest unit that fits."""
    if stored_s is None:
        return "-"
    seconds = max(0, int(time.time()) - stored_s)
    for unit, length in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds} s"
