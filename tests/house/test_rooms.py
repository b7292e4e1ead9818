"""Which room may import which. A room is a folder: a thread, or a side of a border.

The whole of kvtier's structure stands in ``MAY_IMPORT``; an import that it does
not name is a fault, lazy ones and those for type checkers too.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import pytest
from sources import MODULES, TRYING_MODULES, imports_of

MAY_IMPORT = {  # all may import errors; nobody imports tools, which may import all
    "errors": set(),
    "plugin_api": set(),
    "core": {"plugin_api"},
    "settings": {"plugin_api"},
    "policies": {"plugin_api"},
    "engine": {"plugin_api", "core", "settings"},  # never tier, never hosts
    "tier": {"plugin_api", "core"},  # never engine
    "hosts": {"plugin_api", "core", "settings", "tier"},
    "runtime": {"plugin_api", "core", "settings", "engine", "hosts"},
    "recording": {"plugin_api"},
    "vllm": {"plugin_api", "core", "settings", "engine", "runtime", "recording", "kvtier"},
    "testing": {"plugin_api"},
    "backends": {"plugin_api"},
    "kvtier": {"plugin_api", "settings", "engine", "runtime"},  # what it publishes
}
IN_THE_ENGINE = {  # the facade and the cell, above these, may import all of them
    "account": set(),
    "decide": set(),
    "link": {"account", "decide"},  # it meets the primary tier by messages only
    "primary": {"account", "decide"},
    "staged": {"facade"},
}
IN_THE_ADAPTER = {  # the entry points, above these, may import all of them
    "relied_on": set(),
    "vllm_log": set(),
    "releases": {"relied_on"},
    "memory": {"relied_on"},
    "workarounds": {"memory", "releases"},
    "identity": {"memory", "workarounds"},
    "hosted": {"identity", "workarounds"},
    "scheduler": {"memory", "releases", "workarounds", "identity", "hosted", "vllm_log"},
}
UNBOUND = {"tools", "__main__"}  #: commands
OURS = ("kvtier", "kvtier_backends")


def room_of(module: str) -> str:
    """Return the room that a module is in: the folder below its package."""
    package, _, rest = module.partition(".")
    if package == "kvtier_backends":
        return "backends"
    return rest.partition(".")[0] or "kvtier"


def ours_of(module: str) -> set[str]:
    """Return what a module imports of kvtier and its backends."""
    return {name for name in imports_of(MODULES[module]) if name.partition(".")[0] in OURS}


def test_a_room_imports_only_what_it_may() -> None:
    found = {
        f"{module} ({room}) imports {name}"
        for module in MODULES
        if (room := room_of(module)) not in UNBOUND
        for name in ours_of(module)
        if room_of(name) not in {room, "errors", *MAY_IMPORT[room]}
    }
    assert not found


@pytest.mark.parametrize(
    ("folder", "may_import"), [("kvtier.engine.", IN_THE_ENGINE), ("kvtier.vllm.", IN_THE_ADAPTER)]
)
def test_a_room_within_a_room_imports_only_what_it_may(
    folder: str, may_import: dict[str, set[str]]
) -> None:
    rooms = {
        (module.removeprefix(folder).partition(".")[0], name.removeprefix(folder).partition(".")[0])
        for module in MODULES
        if module.startswith(folder)
        for name in imports_of(MODULES[module])
        if name.startswith(folder)
    }
    found = {(room, other) for room, other in rooms if room in may_import and room != other}
    assert found == {(room, other) for room, may in may_import.items() for other in may}
    there = {name.removeprefix(folder).partition(".")[0] for name in MODULES}
    assert may_import.keys() <= there


def test_every_room_in_the_table_is_there() -> None:
    """A line for a room that is gone would allow what nobody needs."""
    assert {room_of(module) for module in MODULES} - UNBOUND == set(MAY_IMPORT)


def test_every_permission_is_used() -> None:
    """One that nobody needs would let the next wrong import in."""
    used = {
        (room_of(module), room_of(name))
        for module in MODULES
        for name in ours_of(module)
        if room_of(module) != room_of(name)
    }
    unused = {
        (room, other)
        for room, others in MAY_IMPORT.items()
        for other in others
        if (room, other) not in used
    }
    assert not unused


def test_what_is_shipped_imports_nothing_of_tests_or_soaks() -> None:
    found = {
        f"{module} imports {name}"
        for module in MODULES
        for name in imports_of(MODULES[module])
        if name.partition(".")[0] in {"tests", "stress"}
    }
    assert not found


def test_a_soak_imports_no_test_and_a_test_no_test_of_another_folder() -> None:
    """What several use stands in ``tests/support``, or in a file whose name begins with ``_``."""
    found = {
        f"{module} imports {name}"
        for module, path in TRYING_MODULES.items()
        for name in imports_of(path)
        if name.startswith("tests.")
        if module.startswith("stress")
        or (name.split(".")[-1].startswith("test_") and folder_of(name) != folder_of(module))
    }
    assert not found


def folder_of(module: str) -> str:
    """Return the package that a module is in."""
    return module.rpartition(".")[0]


def test_no_modules_import_one_another() -> None:
    """Not through a third either, nor while a type checker looks, nor by ``import_module``."""
    every = MODULES | TRYING_MODULES
    graph = {module: (imports_of(path) & set(every)) - {module} for module, path in every.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(circle.args[1][::-1]))
