"""``kvtier fsck``: verifies the contents of a tier's storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.options import File, Json, StoragePlace

if TYPE_CHECKING:
    from kvtier.plugin_api.offline import Verified

PROBLEMS: Final = 1
ROWS_MAX: Final = 50


def fsck(
    path: StoragePlace,
    /,
    *,
    repair: bool = False,
    encryption_key_file: Annotated[File | None, Parameter(metavar="FILE")] = None,
    json: Json = None,
) -> int:
    """Verify a tier's folder: every header, every table, every block's checksum.

    The exit status is 0 if everything is sound, 1 if there were problems, repaired or not, and 2 if
    the folder or an option was refused.

    Parameters
    ----------
    repair
        drop unsound entries, so that they are not found again; no engine may be using a disk tier's
        folder
    encryption_key_file
        the disk tier's encryption keys; without them, encrypted blocks are not verified
    """
    from kvtier.tools.cli import storage  # noqa: PLC0415 - heavy imports stay out of other runs
    from kvtier.tools.terminal import progress, report  # noqa: PLC0415 - as above

    with storage.opened(path, json, encryption_key_file) as offline:
        verified = offline.verify(progress, repair=repair)
    figures = {
        "path": offline.place,
        "complete": verified.is_complete,
        "sound": verified.is_complete and not verified.problem_count,
        "repair": repair,
        "repaired": verified.repaired,
        **verified.figures,
        "problems": [*verified.problems],
    }
    report(json, figures, lambda: _show(offline.place, verified, repair=repair))
    if not verified.is_complete:
        return INTERRUPTED
    return PROBLEMS if verified.problem_count else 0


def _show(place: str, verified: Verified, *, repair: bool) -> None:
    from kvtier.tools.terminal import table  # noqa: PLC0415 - as in fsck

    print(place)
    table("Found", ("", ""), verified.rows)
    problems = verified.problems
    if problems:
        rows = [
            ["-" if cell is None else cell for cell in problem.values()]
            for problem in problems[:ROWS_MAX]
        ]
        table("Problems", [*problems[0]], rows)
    if len(problems) > ROWS_MAX:
        print(f"... and {len(problems) - ROWS_MAX:,} more; --json has them.")
    print(_verdict(verified, repair=repair))


def _verdict(verified: Verified, *, repair: bool) -> str:
    """Return the result in a sentence or two."""
    if not verified.is_complete:
        return "Interrupted: not everything was checked."
    count = verified.problem_count
    text = "Sound."
    if count and repair:
        left = count - verified.repaired
        text = f"Problems: {count:,}, of which {verified.repaired:,} repaired, {left:,} left."
    elif count:
        text = f"Problems: {count:,}. Nothing was changed: {verified.advice}"
    return f"{text} {verified.remark}".rstrip()
