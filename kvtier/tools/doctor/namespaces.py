"""Rule of storage that engines share: with different names they find no common blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvtier.tools.checking.findings import Finding
from kvtier.tools.checking.rules import NAMESPACES_APART
from kvtier.tools.cli.namespaces import differences

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MODEL: Final = "model_name"
FACTS_MAX: Final = 3


def namespaces_apart(place: str, namespaces: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield differences of namespaces of the same model. ``namespaces``: the facts of each."""
    of_model: dict[str, list[Mapping[str, Any]]] = {}
    for facts in namespaces:
        if MODEL in facts:
            of_model.setdefault(str(facts[MODEL]), []).append(facts)
    for model, several in of_model.items():
        rows = differences(several)
        if rows:
            named = [f"{row['fact']} ({', '.join(map(str, row['values']))})" for row in rows]
            more = f" and {len(named) - FACTS_MAX} facts more" if len(named) > FACTS_MAX else ""
            yield Finding(
                NAMESPACES_APART,
                f"{place} has {len(several)} namespaces of {model}, which differ in "
                f"{', '.join(named[:FACTS_MAX])}{more}.",
                "Start all engines with the same settings; kvtier ls shows all that differs, and "
                "kvtier purge removes a namespace that no engine uses.",
            )
