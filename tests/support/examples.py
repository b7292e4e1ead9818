"""How much there is of a proof that has no end: enough in ``make test``, more in ``test-long``.

``KVTIER_TEST_TIMES`` multiplies the examples of the properties that take longest, and
``KVTIER_TEST_SEED`` begins other random stories than those of ``make test``.
"""

from __future__ import annotations

import os
from typing import Final

TIMES: Final = int(os.environ.get("KVTIER_TEST_TIMES") or 1)
SEED: Final = int(os.environ.get("KVTIER_TEST_SEED") or 0)


def examples(enough: int) -> int:
    """Return the examples to be drawn where ``enough`` show what most mistakes do."""
    return enough * TIMES
