"""Checks whether kvtier is tested with the installed vLLM, and if not, which parts have moved.

The adapter's sources show what it imports, and which attributes it mentions; of each
imported class, the members of these names are listed. A line that ends with "private"
names something that vLLM does not publish. ``relied_on.txt`` is the list for the newest
tested release::

    python -m kvtier.vllm.relied_on          # prints what has moved; exit status 1 if anything has
    python -m kvtier.vllm.relied_on --list   # prints the list for the installed vLLM

Importing this module imports nothing of vLLM: that may raise if a part is gone.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kvtier.errors import ConfigError
from kvtier.plugin_api.log import log
from kvtier.settings.vllm_releases import TESTED, is_tested

if TYPE_CHECKING:
    from types import ModuleType

REMEDY: Final = f"use vLLM {' or '.join(TESTED)}"

LISTED: Final = Path(__file__).with_suffix(".txt")
MISSING: Final = "missing"

_CORE: Final = "vllm.v1.engine.core.EngineCore"
_OFFLOADING: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
RIGHT_BY: Final = (
    # The manager forgets KV data when the weights change, or a user resets the cache.
    "vllm.v1.kv_offload.base.OffloadingManager.reset_cache",
    f"{_OFFLOADING}.scheduler.OffloadingConnectorScheduler.reset_cache",
    *(f"{_CORE}.{name}" for name in ("collective_rpc", "reset_prefix_cache", "sleep")),
    *(f"{_CORE}.{name}" for name in ("set_weight_version", "step", "step_with_batch_queue")),
    # The names of blocks: LoRA adapters and media by content, KV caches by layout.
    *(f"{_CORE}.{name}" for name in ("add_lora", "remove_lora")),
    "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys",
    "vllm.v1.request.Request.from_engine_core_request",
    f"{_OFFLOADING}.worker.OffloadingConnectorWorker.register_kv_caches",
    # Which blocks of a group belong to a prompt.
    f"{_OFFLOADING}.scheduler.SchedulerOffloadConfig.from_spec",
)
"""Functions without which an engine may give wrong answers: kvtier wraps or overrides them, and
would not be called. All others that are gone cost a feature, or end the engine with an error."""

_REACHED: Final = (
    ("vllm.config", "VllmConfig"),
    ("vllm.config", "ModelConfig"),
    ("vllm.config", "CacheConfig"),
    ("vllm.config", "LoadConfig"),
    ("vllm.config", "ParallelConfig"),
    ("vllm.config", "SpeculativeConfig"),
    ("vllm.v1.kv_offload.config", "OffloadingCacheConfig"),
    ("vllm.v1.kv_offload.config", "OffloadingGroupConfig"),
    ("vllm.v1.kv_offload.config", "OffloadingModelConfig"),
    ("vllm.v1.kv_offload.config", "OffloadingParallelConfig"),
)
"""Classes whose objects come to the adapter without an import."""

_PLAIN = {*dir(int), *dir(str), *dir(tuple)}  # members that vLLM's classes have from Python's


def check_release() -> None:
    """Warn if kvtier is not tested with this vLLM, and log what has moved in it; once a process.

    Raises ``ConfigError`` if answers could be wrong (``RIGHT_BY``). The check takes a second; a
    tested release is not checked.
    """
    _check(str(import_module("vllm").__version__))


@cache
def _check(installed: str) -> None:
    if is_tested(installed):
        return
    try:
        checked, found = moved()
    except Exception:  # noqa: BLE001 - a check that fails must not end the engine
        log.warning(
            "the parts of this vLLM that kvtier relies on could not be checked", exc_info=True
        )
        return
    log.warning(
        "kvtier is not tested with this vLLM",
        vllm=installed,
        tested=", ".join(TESTED),
        checked=checked,
        moved=", ".join(map(str, found)) or "nothing",
        remedy="install one of these, or a kvtier that is tested with this one",
    )
    lost = [str(each) for each in found if each.endangers_answers]
    if lost:
        raise ConfigError(
            f"vLLM {installed}: kvtier would give wrong answers, since this vLLM has changed "
            f"{', '.join(lost)}: {REMEDY}, or a kvtier that is tested with this one."
        )


def lines() -> list[str]:
    """Return a line for each name, member and signature, sorted."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    trees = [ast.parse(path.read_text()) for path in sources if path != Path(__file__)]
    mentioned = {name for tree in trees for name in _mentioned_by(tree)}
    found: set[str] = set()
    for module, name in {*_REACHED, *(each for tree in trees for each in _imported_by(tree))}:
        try:
            home = _import(module)
            # A module is an attribute of its package only once it has been imported.
            thing = getattr(home, name) if hasattr(home, name) else _import(f"{module}.{name}")
        except Exception:  # noqa: BLE001, S112 - missing; another vLLM may raise anything
            continue
        found |= set(_of(f"{module}.{name}", thing, mentioned))
    return sorted(found)


class Moved(NamedTuple):
    """One name of vLLM that is not as it was in the newest tested release."""

    name: str
    before: str  #: its parameters, or its kind
    now: str  #: the same, or ``MISSING``

    def __str__(self) -> str:
        """Return the name, with what has become of it."""
        return f"{self.name} {self.now}" if self.now == MISSING else f"{self.name}{self.now}"

    @property
    def endangers_answers(self) -> bool:
        """Whether kvtier must not run with this change. New optional parameters do no harm."""
        if self.now == MISSING:  # it may be the class
            return any(f"{each}.".startswith(f"{self.name}.") for each in RIGHT_BY)
        same, _, added = self.now.partition(f"{self.before[:-1]}, ")
        is_compatible = not same and all(map(_may_be_left_out, added.removesuffix(")").split(", ")))
        return self.name in RIGHT_BY and not is_compatible


def moved() -> tuple[int, tuple[Moved, ...]]:
    """Return how many names were checked, and those that have moved. Imports what it checks."""
    before = _by_name(LISTED.read_text().splitlines())
    now = _by_name(lines())
    gone = before.keys() - now
    return len(before), tuple(
        Moved(name, what, now.get(name, MISSING))
        for name, what in before.items()
        # A class stands for its members.
        if now.get(name) != what and name.rpartition(".")[0] not in gone
    )


def _may_be_left_out(parameter: str) -> bool:
    return "=" in parameter or parameter.startswith("*")


def _by_name(listed: list[str]) -> dict[str, str]:
    found = {}
    for line in listed:
        name, what = re.split(r"(?=[:(])", line.removesuffix("  private"), maxsplit=1)
        found[name] = what
    return found


def _import(module: str) -> ModuleType:
    return import_module(f"vllm.{module.removeprefix('vllm.')}")  # never another package


def _imported_by(tree: ast.AST) -> set[tuple[str, str]]:
    return {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for alias in node.names
        if node.module
    }


def _mentioned_by(tree: ast.AST) -> set[str]:
    """Return the names of all attributes that are read or defined, or are passed as text."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {name for name in names if name.isidentifier() and not name.startswith("__")}


def _of(path: str, thing: object, mentioned: set[str]) -> list[str]:
    is_reached = tuple(path.rsplit(".", 1)) in _REACHED
    found = [_line(path, ": class" if is_reached else _signature(thing))]
    if not inspect.isclass(thing):
        return found
    fields = getattr(thing, "__dataclass_fields__", {})
    for name in sorted(mentioned - _PLAIN):
        if name in fields:
            found.append(_line(f"{path}.{name}", ": field"))
        elif issubclass(thing, enum.Enum) and name in thing.__members__:
            found.append(_line(f"{path}.{name}", ": member"))
        elif hasattr(thing, name):
            found.append(_line(f"{path}.{name}", _signature(inspect.getattr_static(thing, name))))
    return found


def _signature(thing: object) -> str:
    """Return the parameters with their kinds and which are optional, or the kind of ``thing``."""
    if isinstance(thing, property):
        return ": property"
    if isinstance(thing, classmethod | staticmethod):
        thing = thing.__func__
    if not callable(thing):
        return ": attribute"
    if inspect.isclass(thing) and issubclass(thing, enum.Enum):
        return ": enum"
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:
        return ": callable"
    bare = [
        each.replace(
            annotation=inspect.Parameter.empty,
            default=each.default if each.default is inspect.Parameter.empty else ...,
        )
        for each in parameters
    ]
    return str(inspect.Signature(bare)).replace("Ellipsis", "...")


def _line(path: str, what: str) -> str:
    is_private = any(part.startswith("_") for part in path.split("."))
    return f"{path}{what}" + ("  private" if is_private else "")


def main(arguments: list[str]) -> int:
    """Print what has moved, or the list; return the exit status."""
    if arguments:
        sys.stdout.write("\n".join([*lines(), ""]))
        return 0
    checked, found = moved()
    gone = sum(each.now == MISSING for each in found)
    installed = import_module("vllm").__version__
    sys.stdout.write(
        f"vLLM {installed}: {checked} names checked, {gone} missing, {len(found) - gone} changed\n"
    )
    for each in found:
        is_refused = ", so kvtier refuses to start" if each.endangers_answers else ""
        sys.stdout.write(f"{each.name}\n  was {each.before}\n  now {each.now}{is_refused}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
