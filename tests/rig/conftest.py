"""vLLM is imported before pytest makes errors of warnings."""

from __future__ import annotations

import tests.rig.quiet_vllm  # noqa: F401 - imported for what it does
