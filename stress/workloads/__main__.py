"""``python -m stress.workloads FOLDER``: writes a trace of each shape there."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stress.workloads.shapes import BLOCK_TOKENS, SHAPES

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(given: Sequence[str] | None = None) -> int:
    """Write the traces; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m stress.workloads",
        description="Write made-up traces of other shapes than the public ones, for kvtier replay.",
        epilog="\n".join(f"{name:10} {what}" for name, (what, _) in SHAPES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="gets a file SHAPE.jsonl for each shape")
    parser.add_argument("--seed", type=int, default=2, help="default: %(default)s")
    asked = parser.parse_args(given)
    asked.folder.mkdir(parents=True, exist_ok=True)
    for name in SHAPES:
        write_trace(name, asked.seed, asked.folder / f"{name}.jsonl")
    return 0


def write_trace(name: str, seed: int, file: Path) -> None:
    """Write the requests of a shape as a ``plain`` trace, in the order of their times."""
    requests = sorted(SHAPES[name].requests(random.Random(f"{seed}:{name}")))
    with file.open("w") as lines:
        for at_s, blocks in requests:
            line = {
                "time_s": round(at_s, 6),
                "tokens": len(blocks) * BLOCK_TOKENS,
                "blocks": blocks,
            }
            lines.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
