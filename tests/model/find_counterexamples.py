"""Find stories anew that show mistakes: of those that are named, or of all whose story is unfit.

``make counterexamples``, or ``make counterexamples NAMES="evict_a_pinned_slot drop_an_unpin"``.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import NoReturn

import counterexamples
import hypothesis
import structlog
from mistakes import MISTAKES


def main(names: list[str]) -> None:
    """Write after each, so that what was found stays found."""
    unknown = sorted(set(names) - set(MISTAKES))
    if unknown:
        raise SystemExit(f"no such mistakes: {' '.join(unknown)}")
    version, blobs = counterexamples.stored() if counterexamples.FILE.exists() else ("", {})
    if version != hypothesis.__version__:
        blobs = {}
    blobs = {name: blob for name, blob in blobs.items() if name in MISTAKES and name not in names}
    for name, mistake in sorted(MISTAKES.items()):
        with contextlib.redirect_stdout(io.StringIO()):  # the steps of each story
            if name in blobs and counterexamples.tells(mistake, blobs[name]):
                continue
            blobs[name] = counterexamples.find(mistake)
        counterexamples.store(blobs)
        print(f"{name}: {len(blobs[name])} bytes", flush=True)
    counterexamples.store(blobs)


def _drop(*_: object) -> NoReturn:
    raise structlog.DropEvent


if __name__ == "__main__":
    # As for the tests (tests/conftest.py): a story may take long on a busy machine.
    hypothesis.settings.register_profile("kvtier", deadline=None)
    hypothesis.settings.load_profile("kvtier")
    structlog.configure(processors=[_drop])
    main(sys.argv[1:])
