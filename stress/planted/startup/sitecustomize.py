"""What each Python does first whose ``PYTHONPATH`` has this folder.

It plants, if it is a tier's or one of a vLLM server's.
"""

import os
import sys

_NAME = os.environ.get("KVTIER_STRESS_PLANT")
_IS_TIER = any(each.startswith("kvtier-") for each in sys.orig_argv)
if _NAME and (_IS_TIER or "KVTIER_STRESS_SERVER" in os.environ):
    from stress.planted.faults import PLANTS

    PLANTS[_NAME].put()
