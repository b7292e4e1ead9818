"""The description of an engine's own namespace, as stored beside the blocks on a server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kvtier.errors import StoreFault
from kvtier.plugin_api.options import shown
from kvtier_backends.shared.namespaces import (
    DESCRIPTION_BYTES_MAX,
    DescriptionDamaged,
    describe,
    first_difference,
    parse_description_untrusted,
)

if TYPE_CHECKING:
    from kvtier.plugin_api.backend import BackendContext


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
            f"{self.name} if nobody needs it"
        )
