"""A soak that lasts until it is interrupted: ``python -m`` this, with its layer.

It has the gate's limits, so that a busy machine doesn't end it, and wants more requests than there
will be.
"""

from __future__ import annotations

import sys
from importlib import import_module

from stress.__main__ import main
from stress.runtime.in_process import InProcess
from stress.supervisor import supervised

REQUESTS = 10**9


def run() -> int:
    """Run it; returns its exit status."""
    layer = sys.argv[1]
    import_module(f"stress.{layer}.layer")
    for each in all_layers(InProcess):
        each.requests_min = REQUESTS
    return main(["--gate", "--layer", layer])


def all_layers(layer: type[InProcess]) -> list[type[InProcess]]:
    """Return a layer, and all that are made from it."""
    return [layer, *(below for each in layer.__subclasses__() for below in all_layers(each))]


if __name__ == "__main__":
    sys.exit(supervised(run))
