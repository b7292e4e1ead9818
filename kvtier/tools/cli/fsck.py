"""Verify the folder of a disk or an fs tier: every header, every table, every block's checksum.

With --repair, what is unsound is dropped, so that nothing of it is found again.
The exit status is 0 if all is sound, 1 if there were problems, repaired or not,
and 2 if the folder or an option was refused.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvtier.plugin_api.extras import install
from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.options import add_folder_options

if TYPE_CHECKING:
    import argparse

    from kvtier_backends.disk.offline.fsck import Checked
    from kvtier_backends.encryption.keys import Keyring

PROBLEMS: Final = 1
ROWS_MAX: Final = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_folder_options(parser)
    parser.add_argument(
        "--repair",
        action="store_true",
        help="drop what is unsound; no engine may be using a disk tier's folder",
    )
    parser.add_argument(
        "--encryption-key-file",
        metavar="FILE",
        help="the disk tier's encryption keys; without them, encrypted blocks are not verified",
    )


def run(arguments: argparse.Namespace) -> int:
    """Check the folder. Returns the exit status."""
    from kvtier.tools.cli import folders  # noqa: PLC0415 - heavy imports stay out of other runs
    from kvtier.tools.cli.terminal import progress  # noqa: PLC0415 - as above
    from kvtier_backends.disk.offline.fsck import (  # noqa: PLC0415 - as above
        Checker,
        folder_damaged,
    )
    from kvtier_backends.disk.offline.inspection import Folder, FolderDamaged  # noqa: PLC0415 - as above

    folders.check(arguments)
    if folders.is_fs_folder(arguments.path):
        return _check_fs(arguments)
    keyring = _keys(arguments.encryption_key_file)
    repair = bool(arguments.repair)
    checked: Checked
    try:
        Folder(arguments.path)  # before the claim, which would make a folder and a lock file
    except FolderDamaged:
        with folders.claimed(arguments.path, "fsck --repair") if repair else nullcontext():
            checked = folder_damaged(arguments.path, repair=repair)
    else:
        with (
            folders.claimed(arguments.path, "fsck --repair") if repair else nullcontext(),
            folders.refusing(arguments.path),
            Folder(arguments.path, writable=repair) as folder,
        ):
            numbers = folder.files.numbers()
            with progress("checking regions", len(numbers)) as bar:
                checked = Checker(folder, keyring, repair=repair).run(numbers, bar.advance)
    figures = _figures(arguments.path, checked, repair=repair)
    folders.report(arguments, figures, _show)
    if not checked.is_complete:
        return INTERRUPTED
    return PROBLEMS if checked.problems else 0


def _check_fs(arguments: argparse.Namespace) -> int:
    from kvtier.errors import ConfigError  # noqa: PLC0415 - as in run
    from kvtier.tools.cli import fs_folders  # noqa: PLC0415 - as in run

    if arguments.encryption_key_file is not None:
        raise ConfigError(
            f"--encryption-key-file is for the folder of a disk tier, and {arguments.path} is that "
            "of an fs tier. Leave it out."
        )
    return fs_folders.fsck(arguments)


def _keys(path: str | None) -> Keyring | None:
    """Return the keys in a file. Raises ``ConfigError``."""
    if path is None:
        return None
    from kvtier.errors import ConfigError  # noqa: PLC0415 - as in run
    from kvtier_backends.encryption.keys import parse_keys_untrusted  # noqa: PLC0415 - as in run
    from kvtier_backends.shared.secret_file import read_secret_file  # noqa: PLC0415 - as in run

    try:
        import cryptography  # noqa: F401, PLC0415 - an extra

        return parse_keys_untrusted(read_secret_file(path))
    except ImportError:
        raise ConfigError(
            "--encryption-key-file needs the package cryptography. "
            f"Install it with: {install('protection')}"
        ) from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise ConfigError(
            f"--encryption-key-file {path} gives no keys ({reason}). Name the tier's own."
        ) from None


def _figures(path: str, checked: Checked, *, repair: bool) -> dict[str, Any]:
    return {
        "path": str(Path(path).absolute()),
        "complete": checked.is_complete,
        "sound": checked.is_complete and not checked.problems,
        "repair": repair,
        "repaired": checked.repaired,
        "in_use": checked.user is not None,
        "engine_pid": None if checked.user is None else checked.user.pid,
        "regions": dict(sorted(checked.regions.items())),
        "blocks_sound": checked.blocks,
        "blocks_unverified": checked.blocks_unverified,
        "blocks_skipped": checked.blocks_skipped,
        "bytes_read": checked.bytes_read,
        "problems": [
            {"case": each.case, "region": each.region, "count": each.size, "what": each.what}
            for each in checked.problems
        ],
    }


def _show(figures: dict[str, Any]) -> None:
    from kvtier.tools.cli.folders import gib  # noqa: PLC0415 - as in run
    from kvtier.tools.cli.terminal import table  # noqa: PLC0415 - as in run

    rows: list[tuple[str, str]] = [("sound blocks", f"{figures['blocks_sound']:,}")]
    if figures["blocks_unverified"]:
        rows.append(("encrypted blocks, not verified", f"{figures['blocks_unverified']:,}"))
    if figures["blocks_skipped"]:
        rows.append(("blocks in use, skipped", f"{figures['blocks_skipped']:,}"))
    rows.append(("GiB read", gib(figures["bytes_read"])))
    for case, count in figures["regions"].items():
        name = case.removeprefix("region_").replace("_", " ")
        rows.append((f"regions: {name}", f"{count:,}"))
    print(figures["path"])
    table("Found", ("", ""), rows)
    problems = figures["problems"]
    if problems:
        table(
            "Problems",
            ("case", "region", "count", "what"),
            [
                (p["case"], "-" if p["region"] is None else p["region"], p["count"], p["what"])
                for p in problems[:ROWS_MAX]
            ],
        )
    if len(problems) > ROWS_MAX:
        print(f"... and {len(problems) - ROWS_MAX:,} more; --json has all of them.")
    print(_verdict(figures))


def _verdict(figures: dict[str, Any]) -> str:
    """Say in one sentence how it stands."""
    if not figures["complete"]:
        return "Interrupted: not everything was checked."
    count = len(figures["problems"])
    sealed = figures["blocks_unverified"]
    rest = (
        f" {sealed:,} encrypted blocks were not verified: give their keys with "
        "--encryption-key-file."
        if sealed
        else ""
    )
    if not count:
        return "Sound." + rest
    if not figures["repair"]:
        return (
            f"Problems: {count:,}. Nothing was changed: --repair drops what is unsound; an engine "
            f"skips it as well.{rest}"
        )
    left = count - figures["repaired"]
    return f"Problems: {count:,}, of which {figures['repaired']:,} repaired, {left:,} left.{rest}"
