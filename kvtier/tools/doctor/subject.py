"""Defines the subject of the doctor's rules: a readable configuration, and the machine."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping  # noqa: TC003 - a field's type, read at run time
from dataclasses import dataclass, field, replace
from pathlib import Path  # noqa: TC003 - likewise
from typing import TYPE_CHECKING, Annotated, Any, Final

from cyclopts import Parameter

from kvtier.errors import ConfigError
from kvtier.plugin_api.machine import ROOT
from kvtier.settings.extra_config import cpu_bytes_to_use
from kvtier.settings.vllm_releases import Installed, installed
from kvtier.tools.checking.engine_arguments import EngineArguments, offloaded_tokens
from kvtier.tools.cli.options import File  # noqa: F401 - of fields that are inherited

if TYPE_CHECKING:
    from kvtier.settings.runtime_config import TierConfig

_OCTAL: Final = re.compile(r"\\([0-7]{3})")


@Parameter(name="*", group="vLLM's arguments")
@dataclass(frozen=True, kw_only=True)
class DoctorArguments(EngineArguments):
    """Arguments of vLLM, by vLLM's names."""

    max_model_len: Annotated[int | None, Parameter(metavar="TOKENS")] = None
    """as vLLM gets it"""

    kv_cache_memory_bytes: Annotated[str | None, Parameter(metavar="SIZE")] = None
    """KV cache of each GPU, as vLLM gets it, or as its log reports it"""

    no_enable_prefix_caching: bool = False
    """as vLLM gets it"""

    prefix_caching_hash_algo: Annotated[str, Parameter(metavar="NAME")] = "sha256"
    """as vLLM gets it"""

    kv_events_config: Annotated[str | None, Parameter(metavar="JSON")] = None
    """as vLLM gets it"""


NO_ARGUMENTS: Final = DoctorArguments()


@dataclass(frozen=True)
class Machine:
    """The machine as this process sees it, or as a test gives it."""

    root: Path = ROOT  #: the folder with ``proc`` and ``sys``
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    vllm: Installed | None = field(default_factory=installed)

    def filesystem_of(self, path: str) -> str:
        """Return the type of the filesystem that holds a path, links resolved; empty: unknown."""
        try:
            lines = (self.root / "proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:
            return ""
        found, longest = "", ""
        for line in lines.splitlines():
            before, _, behind = line.partition(" - ")
            fields = before.split()
            if len(fields) < 5 or not behind:
                continue
            mounted = _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
            # The last of several at one place hides the others.
            if len(mounted) >= len(longest) and _is_below(path, mounted):
                found, longest = behind.split()[0], mounted
        return found


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


@dataclass(frozen=True)
class Subject:
    """One configuration, for an engine with these arguments, on this machine."""

    extra: Mapping[str, Any]  #: the part that kvtier reads
    tiers: tuple[TierConfig, ...]
    engine: DoctorArguments
    machine: Machine
    block_bytes: int  #: of one block of all workers; 0: not known
    is_latent: bool = False  #: whether each GPU holds all of a block
    model_tokens: int = 0  #: of the longest prompt, by the model's config; 0: not known
    gpu_tokens: int = 0  #: in the KV cache of a running engine's GPUs; 0: not known

    @property
    def primary_bytes(self) -> int:
        """``cpu_bytes_to_use``; 0 if it is not a size."""
        try:
            return cpu_bytes_to_use(self.extra)
        except ConfigError:
            return 0

    @property
    def slots(self) -> int:
        """Slots of the primary tier; 0: not known."""
        return self.primary_bytes // self.block_bytes if self.block_bytes else 0

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return offloaded_tokens(self.engine, self.extra)

    @property
    def prompt_blocks(self) -> int:
        """Blocks of the longest prompt; 0: not known."""
        return -(-(self.engine.max_model_len or self.model_tokens) // self.block_tokens)

    @property
    def longest_prompt(self) -> str:
        """The longest prompt, in words."""
        if self.engine.max_model_len:
            return f"a prompt of --max-model-len {self.engine.max_model_len}"
        return f"a prompt of {self.model_tokens} tokens, which {self.engine.model} takes,"

    def beside(self, cache_config: Mapping[str, str]) -> Subject:
        """Return it with the size of a running engine's GPU cache, by the labels of its metric."""
        tokens, blocks = cache_config.get("block_size", ""), cache_config.get("num_gpu_blocks", "")
        if not (tokens.isdecimal() and blocks.isdecimal() and int(tokens)):
            return self
        engine = replace(self.engine, block_size=int(tokens))
        return replace(self, engine=engine, gpu_tokens=int(tokens) * int(blocks))
