"""kvtier: a multi-tier KV-cache offloading runtime for vLLM, made of actors.

Without vLLM: build a ``RuntimeConfig``, give it memory, call ``open_runtime``.
With vLLM: see ``kvtier.vllm``. This package imports neither vllm nor torch.
"""

from kvtier.engine.facade import SchedulerFacade as SchedulerFacade
from kvtier.errors import Closed as Closed
from kvtier.errors import ConfigError as ConfigError
from kvtier.errors import InternalError as InternalError
from kvtier.errors import KVTierError as KVTierError
from kvtier.errors import Misuse as Misuse
from kvtier.errors import NamespaceMismatch as NamespaceMismatch
from kvtier.errors import StoreFault as StoreFault
from kvtier.plugin_api.backend import Namespace as Namespace
from kvtier.plugin_api.slot_memory import SlotMemory as SlotMemory
from kvtier.runtime import open_runtime as open_runtime
from kvtier.settings.runtime_config import RuntimeConfig as RuntimeConfig
from kvtier.settings.runtime_config import TierConfig as TierConfig

__version__ = "0.1.0.dev0"
"""The only place of it: the package's metadata is made of it."""

__all__ = [
    "Closed",
    "ConfigError",
    "InternalError",
    "KVTierError",
    "Misuse",
    "Namespace",
    "NamespaceMismatch",
    "RuntimeConfig",
    "SchedulerFacade",
    "SlotMemory",
    "StoreFault",
    "TierConfig",
    "open_runtime",
]
