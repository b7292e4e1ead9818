"""What ``ls``, ``fsck`` and ``purge`` do to the folder of an ``fs`` tier.

Every file is a block, and engines may be using the folder: what is removed is a miss for them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.folders import gib, refusing, report
from kvtier.tools.cli.namespaces import (
    show_differences,
    show_namespaces,
    show_removed,
    the_one_meant,
)
from kvtier.tools.cli.terminal import progress, table
from kvtier_backends.fs.layout import key_of_file_untrusted
from kvtier_backends.fs.offline.checking import Checked, check_folder
from kvtier_backends.fs.offline.evicting import announce
from kvtier_backends.fs.offline.inspection import BlockFile, FsFolder
from kvtier_backends.posix import clock_ahead_s
from kvtier_backends.shared.holdings import Holding, Wanted
from kvtier_backends.shared.namespaces import facts_of

if TYPE_CHECKING:
    import argparse

PROBLEMS: Final = 1
ROWS_MAX: Final = 50
_ANNOUNCED_AT_ONCE: Final = 1024


# --- ls ---


def ls(arguments: argparse.Namespace) -> int:
    """Show the folder. Returns the exit status."""
    with refusing(arguments.path), FsFolder(arguments.path) as folder:
        holdings, others, is_complete = _holdings(folder)
        lease = folder.lease()
    for holding in holdings:
        holding.describe(facts_of(folder.namespaces.get(holding.namespace, {})))
    rows = sorted(map(asdict, holdings), key=lambda row: row["bytes"], reverse=True)
    figures = {
        "path": folder.path,
        "complete": is_complete,
        "capacity_bytes": None if lease is None else lease.capacity,
        "cleaner": None if lease is None or lease.released else lease.holder,
        "blocks": sum(row["blocks"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "other_bytes": others,
        "namespaces": rows,
    }
    report(arguments, figures, _show_listing)
    return 0 if is_complete else INTERRUPTED


def _holdings(folder: FsFolder) -> tuple[list[Holding], int, bool]:
    holdings = {name: Holding(name) for name in folder.namespaces}
    others = 0
    try:
        for file in folder.files():
            if isinstance(file, BlockFile):
                holdings.setdefault(file.namespace, Holding(file.namespace)).add(
                    key_of_file_untrusted(file.name), file.size, file.stored_s
                )
            else:
                others += file
    except KeyboardInterrupt:
        return list(holdings.values()), others, False
    return list(holdings.values()), others, True


def _show_listing(figures: dict[str, Any]) -> None:
    print(figures["path"])
    capacity = figures["capacity_bytes"]
    table(
        "Folder",
        ("", ""),
        [
            ("capacity, GiB", "-" if capacity is None else gib(capacity)),
            ("cleaned by", figures["cleaner"] or "-"),
            ("blocks", f"{figures['blocks']:,}"),
            ("GiB of blocks", gib(figures["bytes"])),
            ("GiB of other files", gib(figures["other_bytes"])),
        ],
    )
    rows = figures["namespaces"]
    show_namespaces("Blocks by namespace", rows)
    # As short as --namespace takes them.
    digests = [row["namespace"].rpartition("_")[2] for row in rows]
    show_differences(digests, [row["facts"] for row in rows])
    if not figures["complete"]:
        print("Interrupted: not everything was counted.")


# --- fsck ---


def fsck(arguments: argparse.Namespace) -> int:
    """Verify the folder. Returns the exit status."""
    repair = bool(arguments.repair)
    with (
        refusing(arguments.path),
        FsFolder(arguments.path) as folder,
        progress("checking blocks", None) as bar,
    ):
        checked = check_folder(folder, bar.advance, repair=repair)
    figures = _checked_figures(folder.path, checked, repair=repair)
    report(arguments, figures, _show_checked)
    if not checked.is_complete:
        return INTERRUPTED
    return PROBLEMS if checked.cases else 0


def _checked_figures(path: str, checked: Checked, *, repair: bool) -> dict[str, Any]:
    return {
        "path": path,
        "complete": checked.is_complete,
        "sound": checked.is_complete and not checked.cases,
        "repair": repair,
        "repaired": checked.repaired,
        "blocks_sound": checked.blocks,
        "blocks_unverified": checked.unverified,
        "blocks_skipped": checked.skipped,
        "bytes_read": checked.bytes_read,
        "cases": dict(checked.cases),
        "problems": [problem._asdict() for problem in checked.problems],
    }


def _show_checked(figures: dict[str, Any]) -> None:
    print(figures["path"])
    table(
        "Found",
        ("", ""),
        [
            ("sound blocks", f"{figures['blocks_sound']:,}"),
            ("blocks without a checksum, not verified", f"{figures['blocks_unverified']:,}"),
            ("blocks removed meanwhile, skipped", f"{figures['blocks_skipped']:,}"),
            ("GiB read", gib(figures["bytes_read"])),
        ],
    )
    problems = figures["problems"]
    if problems:
        rows = [(each["case"], each["file"], each["what"]) for each in problems[:ROWS_MAX]]
        table("Problems", ("case", "file", "what"), rows)
    if len(problems) > ROWS_MAX:
        print(f"... and {len(problems) - ROWS_MAX:,} more; --json has them.")
    print(_verdict(figures))


def _verdict(figures: dict[str, Any]) -> str:
    if not figures["complete"]:
        return "Interrupted: not everything was checked."
    count = sum(figures["cases"].values())
    if not count:
        return "Sound."
    if not figures["repair"]:
        return (
            f"Problems: {count:,}. Nothing was changed: --repair removes what is damaged; an "
            "engine removes it when it comes upon it."
        )
    left = count - figures["repaired"]
    return f"Problems: {count:,}, of which {figures['repaired']:,} repaired, {left:,} left."


# --- purge ---


def purge(arguments: argparse.Namespace, wanted: Wanted) -> int:
    """Remove what was selected. Returns the exit status."""
    dry = bool(arguments.dry_run)
    with refusing(arguments.path), FsFolder(arguments.path) as folder:
        namespace = the_one_meant(wanted.namespace, list(folder.namespaces))
        wanted = wanted._replace(namespace=namespace, before_s=_by_its_clock(folder, wanted))
        gone, failed, is_complete = _purge(folder, wanted, dry=dry)
    figures = {
        "path": folder.path,
        "dry_run": dry,
        "complete": is_complete,
        "blocks": sum(holding.blocks for holding in gone.values()),
        "bytes": sum(holding.bytes for holding in gone.values()),
        "blocks_failed": failed,
        "namespaces": [asdict(holding) for holding in gone.values()],
    }
    report(arguments, figures, _show_purged)
    if not is_complete:
        return INTERRUPTED
    return PROBLEMS if failed else 0


def _by_its_clock(folder: FsFolder, wanted: Wanted) -> float | None:
    """Return the time that was asked for as the server of the folder reckons it."""
    if wanted.before_s is None:
        return None
    try:
        return wanted.before_s + clock_ahead_s(folder.path)
    except OSError:  # it can't be written: nothing is removed there either
        return wanted.before_s


def _purge(folder: FsFolder, wanted: Wanted, *, dry: bool) -> tuple[dict[str, Holding], int, bool]:
    gone: dict[str, Holding] = {}
    names: list[str] = []
    failed = 0
    try:
        for file in folder.files():
            if not isinstance(file, BlockFile):
                continue
            key = key_of_file_untrusted(file.name)
            if not wanted.has(file.namespace, key, file.stored_s):
                continue
            try:
                is_removed = dry or folder.remove(file)
            except OSError:
                failed += 1
                continue
            if is_removed:
                gone.setdefault(file.namespace, Holding(file.namespace)).add(
                    key, file.size, file.stored_s
                )
                names.append(file.path)
            if not dry and len(names) >= _ANNOUNCED_AT_ONCE:
                announce(folder, names)
                names.clear()
    except KeyboardInterrupt:
        return gone, failed, False
    finally:
        if not dry:
            announce(folder, names)
    return gone, failed, True


def question(arguments: argparse.Namespace) -> str:
    """Return what to ask before all of a folder goes."""
    with refusing(arguments.path), FsFolder(arguments.path) as folder:
        holdings, _, _ = _holdings(folder)
        blocks = sum(holding.blocks for holding in holdings)
        size = gib(sum(holding.bytes for holding in holdings))
        return (
            f"Remove all blocks from {folder.path}, which engines may be using: {blocks:,} blocks, "
            f"{size} GiB, {len(holdings)} namespaces? [y/N] "
        )


def _show_purged(figures: dict[str, Any]) -> None:
    show_removed(figures, show_namespaces)
