"""Wraps vLLM's methods once: its classes are the process's, in which several engines may start."""

from __future__ import annotations

import threading
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def once_a_process(hook: Callable[[], None]) -> Callable[[], None]:
    """Make a function do what it does the first time only. Any thread; all wait until it is done.

    What raised is done again.
    """
    hooking = threading.Lock()
    is_done = False

    @wraps(hook)
    def hook_once() -> None:
        nonlocal is_done
        with hooking:
            if not is_done:
                hook()
                is_done = True

    return hook_once
