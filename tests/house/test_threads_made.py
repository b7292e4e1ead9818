"""Every thread of kvtier is one whose errors somebody hears of."""

from __future__ import annotations

import ast

from sources import MODULES, tree_of

HELPER = "kvtier.plugin_api.threads"
COMMANDS = "kvtier.tools."  #: a person reads what they print


def test_threads_are_made_where_what_they_raise_is_logged() -> None:
    """A bare ``threading.Thread`` that raises is gone, and says so where nobody reads."""
    made = {
        f"{module}:{call.lineno}"
        for module in MODULES
        if module != HELPER and not module.startswith(COMMANDS)
        for call in ast.walk(tree_of(MODULES[module]))
        if isinstance(call, ast.Call)
        if ast.unparse(call.func) in {"threading.Thread", "Thread", "threading.Timer", "Timer"}
    }
    assert not made
