"""Namespaces of a folder or of servers: which one is meant, and in what they differ."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from kvtier.errors import ConfigError
from kvtier.tools.cli.folders import age, gib
from kvtier.tools.cli.terminal import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

NAMESPACES_MAX: Final = 8
FACTS_MAX: Final = 40
_VALUE_CHARACTERS_MAX: Final = 26
_MODEL: Final = "model_name"
_MISSING: Final = "(missing)"


def the_one_meant(given: str | None, known: Sequence[str]) -> str | None:
    """Return the namespace that ``--namespace`` names; None: it was not given.

    Raises ``ConfigError``.
    """
    if given is None:
        return None
    meant = [
        name for name in known if name == given or name.rpartition("_")[2].startswith(given.lower())
    ]
    if len(meant) != 1:
        some = "names none" if not meant else f"names {len(meant)}"
        raise ConfigError(
            f"--namespace {given!r} {some} of the namespaces there. Give a whole name, or the "
            f"first digits of its digest: {', '.join(known) or 'there is none'}."
        )
    return meant[0]


def show_namespaces(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Show what there is of each, what of it is dead, and how old it is, where that is known."""
    columns = ["namespace", "blocks", "GiB"]
    cells = [[row["namespace"], f"{row['blocks']:,}", gib(row["bytes"])] for row in rows]
    if any(row["dead_blocks"] for row in rows):
        columns += ["dead", "GiB dead"]
        for row, shown in zip(rows, cells, strict=True):
            shown += [f"{row['dead_blocks']:,}", gib(row["dead_bytes"])]
    if any(row["oldest_s"] is not None for row in rows):
        columns += ["oldest", "newest"]
        for row, shown in zip(rows, cells, strict=True):
            shown += [age(row["oldest_s"]), age(row["newest_s"])]
    table(title, columns, cells)


def show_removed(figures: Mapping[str, Any], show: Callable[[str, list[Any]], None]) -> None:
    """Say what ``purge`` has removed. ``show``: a table with that title, and those rows."""
    verb = "Would be removed" if figures["dry_run"] else "Removed"
    if figures["namespaces"]:
        show(verb, figures["namespaces"])
    size = f"{figures['blocks']:,} blocks, {gib(figures['bytes'])} GiB"
    print(f"{figures['path']}: {verb.lower()}: {size}.")
    if figures["blocks_failed"]:
        print(f"{figures['blocks_failed']:,} blocks could not be removed.")
    if not figures["complete"]:
        print("Interrupted: the rest is as it was.")


def differences(facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what not all of these have alike: ``fact``, by its path, and ``values``, one each."""
    flat = [dict(_flat(each)) for each in facts]
    names = sorted({name for each in flat for name in each})
    rows = [{"fact": name, "values": [each.get(name, _MISSING) for each in flat]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def show_differences(names: Sequence[str], facts: Sequence[Mapping[str, Any]]) -> None:
    """Show them, and whose model it is. ``names``: as in the table above."""
    known = [(name, each) for name, each in zip(names, facts, strict=True) if each]
    known = known[:NAMESPACES_MAX]
    rows = differences([each for _, each in known])
    if known and not any(row["fact"] == _MODEL for row in rows):
        models = [each.get(_MODEL, _MISSING) for _, each in known]
        rows.insert(0, {"fact": _MODEL, "values": models})
    if not known:
        return
    table(
        "What separates them",
        ("fact", "namespace", "value"),
        [
            ("" if index else row["fact"], name, _short(value))
            for row in rows[:FACTS_MAX]
            for index, ((name, _), value) in enumerate(zip(known, row["values"], strict=True))
        ],
    )
    if len(rows) > FACTS_MAX:
        print(f"... and {len(rows) - FACTS_MAX:,} facts more; --json has them.")


def _flat(facts: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    half = _VALUE_CHARACTERS_MAX // 2
    return text if len(text) <= _VALUE_CHARACTERS_MAX else f"{text[: half - 1]}…{text[-half:]}"
