"""Defines the general plugin that vLLM calls in each of its processes if kvtier is installed.

vLLM's front end loads no kvtier code if it defines no metrics, as in ``LLM(...)``, and would mark
no media (``media.py``). So this hooks the creation of a configuration that has kvtier. At that time
nothing runs yet, and no model is loaded: so vLLM's release is checked too (``relied_on.py``), files
that dead engines left in shared memory are removed (``region.py``), the memory for all engines is
checked (``engines_here.py``), and models for which vLLM has no connectors are refused
(``supported_models.py``). Processes without kvtier in their configuration, and those that create
none, stay as they are.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_ARGUMENTS: Final = "vllm.engine.arg_utils"
_hooked: set[str] = set()


def load() -> None:
    """Hook this process to prepare each start with kvtier. May be called any number of times."""
    arguments = getattr(sys.modules.get(_ARGUMENTS), "EngineArgs", None)
    if arguments is not None and _ARGUMENTS not in _hooked:
        _hooked.add(_ARGUMENTS)
        arguments.create_engine_config = _preparing(arguments.create_engine_config)


def _preparing(real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def create_engine_config(arguments: Any, *rest: Any, **named: Any) -> Any:  # noqa: ANN401 - no stubs
        config = real(arguments, *rest, **named)
        if "kvtier" in str(getattr(config, "kv_transfer_config", None)):
            # Imported here: users of vLLM without kvtier need none of it. The check comes first:
            # if another release lacks something, the other imports may raise.
            from kvtier.vllm.relied_on import check_release  # noqa: PLC0415

            check_release()
            from kvtier.vllm.engines_here import require_memory  # noqa: PLC0415
            from kvtier.vllm.identity.media import mark_contents  # noqa: PLC0415
            from kvtier.vllm.memory.region import sweep  # noqa: PLC0415
            from kvtier.vllm.workarounds.supported_models import require_supported_model  # noqa: PLC0415

            require_supported_model(config)
            mark_contents()
            sweep()
            require_memory(config)
        return config

    return create_engine_config
