"""kvtier: a multi-tier KV-cache offloading runtime for vLLM, made of actors.

Without vLLM: build a ``RuntimeConfig``, give it memory, call ``open_runtime``.
With vLLM: see ``kvtier.vllm``. This package imports neither vllm nor torch.
"""

from kvtier.backend import Namespace as Namespace
from kvtier.config import RuntimeConfig as RuntimeConfig
from kvtier.config import TierConfig as TierConfig
from kvtier.errors import Closed as Closed
from kvtier.errors import ConfigError as ConfigError
from kvtier.errors import InternalError as InternalError
from kvtier.errors import KVTierError as KVTierError
from kvtier.errors import Misuse as Misuse
from kvtier.errors import NamespaceMismatch as NamespaceMismatch
from kvtier.errors import StoreFault as StoreFault
from kvtier.facade import SchedulerFacade as SchedulerFacade
from kvtier.memory import SlotMemory as SlotMemory
from kvtier.runtime import open_runtime as open_runtime

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
