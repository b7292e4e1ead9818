"""Writes a block once a second request has used it.

This is the usual advice to spare an SSD, but it costs hits: the second use of
a block always misses the tier.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from kvtier.plugin_api.admission_policy import AdmissionContext, AdmissionPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtier.plugin_api.keys import Key, RequestId
    from kvtier.plugin_api.options import Options

ADMITTED: Final = ""
"""Replaces the first user once a second one has come. No request has this name."""


class SecondTouchAdmission(AdmissionPolicy):
    """Option: ``remembered_blocks_max``; the least recently used are forgotten first."""

    def __init__(self, options: Options, context: AdmissionContext) -> None:
        self._remembered_blocks_max = context.remembered_blocks_max(options)
        options.finish()
        self._first_user: OrderedDict[Key, RequestId] = OrderedDict()

    def admit(self, keys: Sequence[Key], request: RequestId) -> list[bool]:
        """See ``AdmissionPolicy.admit``."""
        admitted = [self._is_second_use(key, request) for key in keys]
        while len(self._first_user) > self._remembered_blocks_max:
            self._first_user.popitem(last=False)
        return admitted

    def end_request(self, request: RequestId, order: Sequence[Key] | None) -> list[Key]:
        """See ``AdmissionPolicy.end_request``. A block never offered is not remembered here."""
        first_user = self._first_user
        return [
            key for key in order or () if first_user.get(key, request) not in {request, ADMITTED}
        ]

    def _is_second_use(self, key: Key, request: RequestId) -> bool:
        first = self._first_user.setdefault(key, request)
        self._first_user.move_to_end(key)
        if first == request:
            return False
        self._first_user[key] = ADMITTED
        return True
