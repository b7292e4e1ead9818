"""``kvtier ls``: lists the contents of a tier's storage."""

from __future__ import annotations

from kvtier.tools.cli.exit_status import INTERRUPTED
from kvtier.tools.cli.options import Json, StoragePlace


def ls(path: StoragePlace, /, *, json: Json = None) -> int:
    """Show the contents of a tier's storage: namespaces, blocks, bytes and ages.

    Nothing is changed, and engines may be using it. It counts the blocks that an engine would find
    at its start.
    """
    from kvtier.tools.cli import namespaces, storage  # noqa: PLC0415 - heavy imports stay out of other runs
    from kvtier.tools.terminal import progress, report, table  # noqa: PLC0415 - as above

    with storage.opened(path, json) as offline:
        contents = offline.list(progress)
    rows = namespaces.figures_of(contents.namespaces)
    figures = {
        "path": offline.place,
        "complete": contents.is_complete,
        **contents.figures,
        **namespaces.sums_of(rows),
        "namespaces": rows,
    }

    def show() -> None:
        print(offline.place)
        if contents.rows:
            table("Folder", ("", ""), contents.rows)
        namespaces.show("Blocks by namespace", rows)
        namespaces.show_differences(rows)
        if not contents.is_complete:
            print("Interrupted: not everything was counted.")

    report(json, figures, show)
    return 0 if contents.is_complete else INTERRUPTED
