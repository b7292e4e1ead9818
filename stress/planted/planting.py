"""Plants one fault in this process and in the tiers' processes that it starts.

kvtier's own code stays as it is: functions are replaced while the run lasts. A tier's process
does so by itself, as soon as its Python starts (``startup/sitecustomize.py``).
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from stress.planted.faults import Plant

VARIABLE: Final = "KVTIER_STRESS_PLANT"
_STARTUP: Final = Path(__file__).parent / "startup"
_REPOSITORY: Final = Path(__file__).parents[2]


def plants() -> Mapping[str, Plant]:
    """Return all plants by name. They import all that they replace."""
    found: Mapping[str, Plant] = import_module("stress.planted.faults").PLANTS
    return found


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Have one fault in all processes until the end of the block; ``None``: none."""
    if name is None:
        yield
        return
    path_before = os.environ.get("PYTHONPATH")
    paths = [str(_STARTUP), str(_REPOSITORY), *sys.path]
    os.environ.update({VARIABLE: name, "PYTHONPATH": os.pathsep.join(paths)})
    take_back = plants()[name].put()
    try:
        yield
    finally:
        take_back()
        del os.environ[VARIABLE]
        if path_before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path_before
