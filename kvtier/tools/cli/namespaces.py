"""Namespaces of a tier's storage: their tables, selection and differences."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.errors import ConfigError
from kvtier.plugin_api.sizes import shown_age, shown_bytes
from kvtier.tools.terminal import table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvtier.plugin_api.offline import NamespaceBlocks

NAMESPACES_MAX: Final = 8
FACTS_MAX: Final = 40
_VALUE_CHARACTERS_MAX: Final = 26
_MODEL: Final = "model_name"
_MISSING: Final = "(missing)"
_DIGITS_SHOWN: Final = 12


def _digest(name: str | None) -> str:
    """Return the part of a namespace's or a key's digest that can be compared by eye."""
    return "-" if name is None else name.rpartition("_")[2][:_DIGITS_SHOWN]


class _Column(NamedTuple):
    """A figure of a namespace, in readable form."""

    name: str
    title: str
    show: Callable[[Any], str]


_COLUMNS: Final = (
    _Column("namespace", "namespace", lambda name: name if "_" in name else _digest(name)),
    _Column("key_id", "key id", _digest),
    _Column("block_bytes", "block bytes", "{:,}".format),
    _Column("blocks", "blocks", "{:,}".format),
    _Column("bytes", "size", shown_bytes),
    _Column("dead_blocks", "dead", "{:,}".format),
    _Column("dead_bytes", "size dead", shown_bytes),
    _Column("slots", "slots", "{:,}".format),
    _Column("oldest_s", "oldest", shown_age),
    _Column("newest_s", "newest", shown_age),
)
_ALWAYS: Final = frozenset({"namespace", "blocks", "bytes"})
_IF_ANY: Final = frozenset({"dead_blocks", "dead_bytes", "oldest_s", "newest_s"})


def the_one_meant(given: str, namespaces: Iterable[str]) -> str:
    """Return the namespace that ``--namespace`` names. Raises ``ConfigError``."""
    known = sorted(set(namespaces))
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


def figures_of(namespaces: Iterable[NamespaceBlocks]) -> list[dict[str, Any]]:
    """Return their rows of a report, the largest first."""
    rows = [each.figures() for each in namespaces]
    return sorted(rows, key=lambda row: row["bytes"], reverse=True)


def sums_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the blocks and bytes of all rows."""
    return {name: sum(row[name] for row in rows) for name in ("blocks", "bytes")}


def summed_up(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the same in readable form."""
    sums = sums_of(rows)
    blocks = "1 block" if sums["blocks"] == 1 else f"{sums['blocks']:,} blocks"
    return f"{blocks}, {shown_bytes(sums['bytes'])}"


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Show the columns that the rows have; those of ``_IF_ANY`` only if one has a value."""
    columns = [
        column
        for column in _COLUMNS
        if (column.name in rows[0] if rows else column.name in _ALWAYS)
        and (column.name not in _IF_ANY or any(row[column.name] for row in rows))
    ]
    cells = [[column.show(row[column.name]) for column in columns] for row in rows]
    table(title, [column.title for column in columns], cells)


def differences(facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the facts in which these differ: ``fact``, by its path, and ``values``, one each."""
    flat = [dict(_flat(each)) for each in facts]
    names = sorted({name for each in flat for name in each})
    rows = [{"fact": name, "values": [each.get(name, _MISSING) for each in flat]} for name in names]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def show_differences(namespaces: Sequence[Mapping[str, Any]]) -> None:
    """Show the differences, and the models. Names are shortened as ``--namespace`` accepts them."""
    known = [(_digest(each["namespace"]), each["facts"]) for each in namespaces if each["facts"]]
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
