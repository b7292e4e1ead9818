"""A whole engine, on a GPU: ``python -m tests.vllm.gpu_engine``; ``--device cpu`` on a CPU.

The same prompts are computed (cold), served from DRAM, from disk, by a new engine, and
by one that follows a ``kill -9``. What they are compared with is a prompt asked twice in
a row, which vLLM's own prefix cache serves: it computes as little, in kernels of the same
shapes, so the tokens must be equal to the last one, whatever the precision. The weights
are random, and planted faults in DRAM must change tokens: with weights that are all
alike (``load_format: dummy``), a DRAM full of zeros would give the same.

Exit status: 0 if all is so, 1 if not, 77 if there is nothing to run it on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.support.cuda import NO_DEVICE, why_no_cuda


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.gpu_engine", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    asked = parser.parse_args()
    missing = why_no_cuda(compiled=True) if asked.device == "cuda" else None
    if missing is not None:
        print(f"this needs a CUDA device and vLLM for CUDA: {missing} Nothing was checked.")
        return NO_DEVICE
    from tests.vllm.gpu_engine.rounds import Failed, judged, run_all

    with tempfile.TemporaryDirectory(prefix="kvtier-gpu-engine-") as folder:
        try:
            lines, wrong = judged(run_all(asked.device, Path(folder)), asked.device)
        except Failed as failed:
            lines, wrong = [], [str(failed)]
    print("\n".join(lines))
    for each in wrong:
        print(f"FAILED: {each}")
    if not wrong:
        print("each tier gave the tokens of vLLM's own prefix cache; damaged DRAM did not")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
