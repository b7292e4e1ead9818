"""Attributes are read by their names, and private ones by their owners.

What reads ``getattr(thing, name)`` of a name that it made up reads nothing, without a word,
once the attribute is called something else: mypy doesn't see it.
"""

from __future__ import annotations

import ast
import re

from sources import MODULES, ROOT, tree_of

AT_WORK = ("core", "engine", "hosts", "plugin_api", "runtime", "settings", "tier", "vllm")
READ_BY_NAME = {
    "kvtier.vllm.identity.page_facts": "all fields of vLLM's specs, those too that are new in a "
    "release",
    "kvtier.vllm.identity.plain_values": "all fields of vLLM's dataclasses",
    "kvtier.vllm.identity.setting_facts": "all of vLLM's settings, those too that are new in a "
    "release",
    "kvtier.vllm.relied_on": "what may be gone in a further release",
    "kvtier.plugin_api.log": "a structlog logger has a method for each level",
}


def is_at_work(module: str) -> bool:
    """Tell whether a module belongs to a running engine, and not to the tools beside it."""
    return module.split(".")[1:2] in [[room] for room in AT_WORK]


def reads_by_name(tree: ast.AST) -> list[str]:
    """Return where an attribute is read whose name isn't written there."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "setattr", "vars"}:
            name = node.args[1] if len(node.args) > 1 else None
            if not isinstance(name, ast.Constant):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Attribute) and node.attr == "__dict__":
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def test_attributes_are_read_by_names_that_mypy_sees() -> None:
    """Slot states and counters reached vLLM by names put together from others."""
    found = {
        module: reads
        for module in filter(is_at_work, MODULES)
        if (reads := reads_by_name(tree_of(MODULES[module])))
    }
    assert found.keys() == set(READ_BY_NAME), found


SHARED_KEYS_MAX = 29
"""Of more attributes than this, CPython no longer shares the names among instances: each read of
one is then slower, which has cost the scheduler's calls 6 %."""


def own_attributes(owner: ast.ClassDef) -> set[str]:
    """Return the attributes that methods of a class assign to ``self``."""
    return {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute)
        if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


def test_no_object_at_work_has_so_many_attributes_that_python_finds_them_slowly() -> None:
    found = {
        f"{module}.{node.name}": len(own_attributes(node))
        for module in filter(is_at_work, MODULES)
        for node in ast.walk(tree_of(MODULES[module]))
        if isinstance(node, ast.ClassDef)
        if not any(ast.unparse(each).startswith("__slots__") for each in node.body)
    }
    assert {name: count for name, count in found.items() if count > SHARED_KEYS_MAX} == {}


MODEL = sorted(path for path in (ROOT / "tests/model").glob("*.py") if "mutations" not in path.name)
REACHES_INSIDE = {
    (
        "disk_promises.py",
        "_readers",
    ): "the disk's regions are no actor; a count of 0 is all they tell",
    ("disk_promises.py", "_writers"): "as above",
    ("disk_tier.py", "_threads"): "takes the place of the backend's threads",
    ("disk_tier.py", "_log"): "takes the place of the driver, whose log it is",
    ("disk_tier.py", "_upkeep"): "ends what the event loop would have ended",
    ("disk_tier.py", "_context"): "gives credit that takes hours to earn",
    ("known_policies.py", "_held"): "a policy need not say what it holds",
    ("known_policies.py", "_kinds"): "a new policy is a copy of one that has learnt nothing",
    ("known_policies.py", "_traits"): "as above",
    ("stepped_loop.py", "_run"): "asyncio's own, as an event loop has to",
    ("stepped_loop.py", "_set_running_loop"): "as above",
    ("world.py", "_lookups"): "puts states that check each move in the place of a list",
    ("world.py", "_slot_state"): "as above",
}


def test_the_model_reads_what_actors_say_and_not_their_private_attributes() -> None:
    """It reads ``audit()``. Mutations change what is private: that is what they are for."""
    found = {
        (path.name, node.attr)
        for path in MODEL
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)
        if ast.unparse(node.value) not in {"self", "super()"}
    }
    assert found == REACHES_INSIDE.keys()
