"""Findings of a check; refusals that calls raise become findings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvtier.errors import ConfigError
from kvtier.tools.checking.rules import REFUSED, TRIAL_FAILED, UNUSABLE_NOW, Severity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from kvtier.tools.checking.rules import Rule

_SENTENCES: Final = re.compile(r"(?<=[.)]) (?=[A-Z])")
_ADVICE: Final = re.compile(
    r"[:;] ((?:did you mean|fix|give|install|lower|name|put|raise|stop|use) [^:;]+)$"
)
"""Matches a remedy that is the end of a sentence."""

CORRECT_IT: Final = "Correct it."


@dataclass(frozen=True)
class Finding:
    """One finding: the fact and the remedy."""

    rule: Rule
    what: str  #: a sentence, which names key and value, or tier and number
    remedy: str  #: a sentence or more; empty if ``what`` contains it, as in some refusals

    @classmethod
    def of_text(cls, rule: Rule, text: str) -> Finding:
        """Return a refusal as a finding; its remedy follows its first sentence."""
        what, *remedy = _SENTENCES.split(text, maxsplit=1)
        return cls(rule, what, "".join(remedy))

    @property
    def text(self) -> str:
        """The whole text, as an engine reports it."""
        return f"{self.what} {self.remedy}".rstrip()

    def figures(self) -> dict[str, str]:
        """Return it for JSON."""
        advice = _ADVICE.search(self.what)
        within = CORRECT_IT if advice is None else advice[1][0].upper() + advice[1][1:]
        return {
            "rule": self.rule.name,
            "severity": self.rule.severity.value,
            "what": self.what,
            "why": self.rule.why,
            "remedy": self.remedy or within,
            "docs": self.rule.docs,
        }


@dataclass
class Findings:
    """Findings, checks that were not made, and lines about sound tiers."""

    found: list[Finding] = field(default_factory=list)
    noted: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    tiers: list[str] = field(default_factory=list)  #: one line a sound tier

    @property
    def refused(self) -> list[str]:
        """Reasons why an engine would not start, as an engine reports them."""
        return [each.text for each in self.found if each.rule is REFUSED]

    @property
    def failed(self) -> list[str]:
        """Reasons why a tier would be of no use, though an engine starts."""
        return [each.text for each in self.found if each.rule is TRIAL_FAILED]

    @property
    def warned(self) -> list[str]:
        """Faults that cost an engine much of its gain."""
        return [each.text for each in self.found if each.rule.severity is Severity.WARNING]

    def figures(self) -> dict[str, list[str]]:
        """Return everything for ``kvtier check --json``."""
        names = ("refused", "failed", "warned", "noted", "not_checked", "tiers")
        return {name: getattr(self, name) for name in names}

    def add(self, rule: Rule, what: str, remedy: str) -> None:
        """Note a finding."""
        self.found.append(Finding(rule, what, remedy))

    def extend(self, found: Iterable[Finding], where: str) -> None:
        """Note findings of one tier."""
        self.found += [Finding(each.rule, f"{where}: {each.what}", each.remedy) for each in found]

    def merge(self, other: Findings) -> None:
        """Add another's findings, each refusal once."""
        new = [each for each in other.found if each.rule is not REFUSED or each not in self.found]
        self.found += new
        self.noted += other.noted
        self.not_checked += other.not_checked
        self.tiers += other.tiers

    def refuse(self, text: object) -> None:
        """Note a refusal, once."""
        finding = Finding.of_text(REFUSED, str(text))
        if finding not in self.found:
            self.found.append(finding)

    def fail(self, text: object) -> None:
        """Note that the trial of a tier failed."""
        self.found.append(Finding.of_text(TRIAL_FAILED, str(text)))

    def trouble(self, text: str, then: str) -> None:
        """Note that a tier can't be used now, and the effect on an engine."""
        finding = Finding.of_text(UNUSABLE_NOW, text)
        self.add(UNUSABLE_NOW, finding.what, f"{finding.remedy} {then}".lstrip())

    def attempt(self, call: Callable[[], object]) -> None:
        """Note a call's refusal, if it raises one."""
        try:
            call()
        except ConfigError as refusal:
            self.refuse(refusal)

    def refuse_each(
        self, values: Mapping[str, object], read: Callable[[Mapping[str, object]], None]
    ) -> None:
        """Note each refusal, and repeat the call without the bad key until the rest is accepted."""
        left = dict(values)
        named = set(values)
        while True:
            try:
                read(left)
            except ConfigError as refused:
                # A key that is missing because it was left out has been reported already.
                if refused.key in left or refused.key not in named:
                    self.refuse(refused)
                if refused.key is not None and refused.misspelt in left:
                    left[refused.key] = left.pop(refused.misspelt)  # as it was probably meant
                    named.add(refused.key)
                elif refused.key in left:
                    del left[refused.key]
                else:
                    return
            else:
                return
