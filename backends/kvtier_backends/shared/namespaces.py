"""Names everything that changes the bytes of a block, and describes it in plain words.

The name is part of every block's name in shared storage. The description is stored beside
the blocks, so that a clash or a mix-up is detected and not served: ``OwnDescription`` is that of an
engine's own namespace, to be written on a server or compared with the one there.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvtier.errors import StoreFault
from kvtier.plugin_api.options import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvtier.plugin_api.backend import BackendContext


DESCRIPTION_BYTES_MAX: Final = 1 << 20
NAMESPACE_DIGEST_BYTES: Final = 16
_DIGEST_HEX_DIGITS: Final = 12
_NAME_CHARACTERS_MAX: Final = 64


class Difference(NamedTuple):
    """The first thing in which a description differs from the engine's own."""

    name: str
    there: object
    here: object


class DescriptionDamaged(StoreFault):
    """Raised for an invalid description. The text has the reason."""


def describe(format_name: str, version: int, context: BackendContext) -> dict[str, Any]:
    """Return the description: JSON values, as they come back from storage."""
    return {
        "format": format_name,
        "format_version": version,
        "block_bytes": context.block_bytes,
        "facts": as_json(context.namespace.facts),
    }


def namespace_digest(context: BackendContext) -> bytes:
    """Return a digest, 16 bytes, of everything that changes the bytes of a block."""
    facts = {"block_bytes": context.block_bytes, "facts": dict(context.namespace.facts)}
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(canonical.encode(), digest_size=NAMESPACE_DIGEST_BYTES).digest()


def namespace_name(context: BackendContext) -> str:
    """Return the name: the model's, for people, with a digest of all facts, for safety.

    Letters, digits, dots, dashes and underscores, at most 77 of them.
    """
    facts = as_json(context.namespace.facts)
    model = str(facts.get("model_name") or facts.get("model") or "model")
    return f"{_safe_name(model)}_{digest_of(facts)}"


def parse_description_untrusted(raw: bytes | memoryview) -> dict[str, Any]:
    """Return the mapping that was written. Raises ``DescriptionDamaged`` and nothing else."""
    try:
        found = json.loads(bytes(raw))
    except (ValueError, RecursionError) as problem:
        raise DescriptionDamaged(str(problem)) from None
    if not isinstance(found, dict):
        raise DescriptionDamaged("it is not a mapping")
    return found


def facts_of(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a description's engines; empty if it is not one of kvtier's."""
    facts = description.get("facts")
    return facts if isinstance(facts, dict) else {}


def first_difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Difference | None:
    """Return where two descriptions differ; None if they don't."""
    for name in sorted({*found, *wanted}):
        there, here = found.get(name, "(missing)"), wanted.get(name, "(missing)")
        if isinstance(there, dict) and isinstance(here, dict):
            inner = first_difference(there, here)
            if inner is not None:
                return Difference(f"{name}.{inner.name}", inner.there, inner.here)
        elif there != here or type(there) is not type(here):
            return Difference(name, there, here)
    return None


def as_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts as they come back from a file (tuples become lists)."""
    values: dict[str, Any] = json.loads(json.dumps(dict(facts), allow_nan=False))
    return values


def digest_of(facts: Mapping[str, Any]) -> str:
    """Return a digest of these JSON values, 12 hex digits."""
    canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:_DIGEST_HEX_DIGITS]


def _safe_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")[:_NAME_CHARACTERS_MAX] or "model"


class OtherNamespace(StoreFault):
    """Raised if another namespace, or something else, has this one's name."""


class OwnDescription:
    """The description to write if there is none, and to compare with one that is found."""

    def __init__(
        self, name: str, format_name: str, version: int, context: BackendContext, option: str
    ) -> None:
        """``name``: its name on the server. ``option``: the option that leads elsewhere."""
        self.name = name
        self.is_read_only = context.read_only  #: a missing description is not written
        self._wanted = describe(format_name, version, context)
        self._option = option
        self.text = json.dumps(self._wanted, indent=2, sort_keys=True).encode()

    def refuse_other_untrusted(self, raw: bytes | memoryview) -> None:
        """Compare the description found there. Raises ``OtherNamespace`` and nothing else."""
        if len(raw) > DESCRIPTION_BYTES_MAX:
            raise self.no_description(f"{len(raw)} bytes")
        try:
            found = parse_description_untrusted(raw)
        except DescriptionDamaged as problem:
            raise self.no_description(str(problem)) from None
        difference = first_difference(found, self._wanted)
        if difference is not None:
            name, there, here = difference
            raise self._other(
                f"of another namespace: {name} is {shown(there)} there and {shown(here)} here"
            )

    def no_description(self, reason: str) -> OtherNamespace:
        """Return the exception for something else under this name."""
        return self._other(f"no description: {reason}")

    def _other(self, what: str) -> OtherNamespace:
        return OtherNamespace(
            f"{self.name} is {what}. Give this engine another {self._option}, or remove "
            f"{self.name} if nothing needs it"
        )
