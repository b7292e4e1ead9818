"""Wraps vLLM's methods once: several engines may start in one process and share its classes."""

from __future__ import annotations

import threading
from functools import wraps
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def once_a_process(hook: Callable[[], None]) -> Callable[[], None]:
    """Make a function run only the first time. Any thread; all callers wait until it has run.

    A run that raised is repeated by the next call.
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
