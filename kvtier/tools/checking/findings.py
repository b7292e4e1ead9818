"""What a check has found, and how a refusal comes to be among it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass
class Findings:
    """What was found. ``refused``: an engine would not start. Texts as an engine would say them."""

    refused: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  #: an engine starts, and a tier is of no use
    warned: list[str] = field(default_factory=list)  #: an engine starts, and gets little of it
    noted: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)  #: one line a sound tier

    @property
    def count(self) -> int:
        """How many refusals and warnings there are."""
        return len(self.refused) + len(self.failed) + len(self.warned)

    def refuse(self, text: object) -> None:
        """Note a refusal, once."""
        if str(text) not in self.refused:
            self.refused.append(str(text))

    def attempt(self, call: Callable[[], object]) -> None:
        """Note what a call refuses, if it does."""
        try:
            call()
        except ConfigError as refusal:
            self.refuse(refusal)

    def refuse_each(
        self, values: Mapping[str, object], read: Callable[[Mapping[str, object]], None]
    ) -> None:
        """Note what is refused; leave the key at fault out, and go on until nothing is."""
        left = dict(values)
        named = set(values)
        while True:
            try:
                read(left)
            except ConfigError as refused:
                # A key that is missing because it was left out has been named already.
                if refused.key in left or refused.key not in named:
                    self.refuse(refused)
                if refused.key is not None and refused.misspelt in left:
                    left[refused.key] = left.pop(refused.misspelt)  # what it was meant to be
                    named.add(refused.key)
                elif refused.key in left:
                    del left[refused.key]
                else:
                    return
            else:
                return
