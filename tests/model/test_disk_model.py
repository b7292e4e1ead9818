"""The promises with a tier on the real disk log, on a disk that tears, reorders and loses writes.

As ``test_model``, with the same profiles. ``KVTierOnDiskSpec`` adds the disk's
own rules and promises to those of every tier.
"""

from __future__ import annotations

import pytest
from disk_machine import KVTierOnDiskSpec
from known_policies import POLICIES
from test_model import PROFILE, check, check_fresh_seeds

EXAMPLES_CI = 40  # with each policy; `make test-long` goes on
CHECKED_WITH = ("lru", pytest.param("reuse", marks=pytest.mark.long))
"""The disk does not care which policy chooses: an old one and the default will do. In the gate, the
old one: one seed tells both much the same stories."""


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("policy", CHECKED_WITH)
def test_every_promise_holds_with_a_disk_that_tears_reorders_and_loses_writes(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert policy in POLICIES
    if PROFILE == "long":
        check_fresh_seeds(KVTierOnDiskSpec, policy, capsys)
    else:
        check(KVTierOnDiskSpec, policy, 20_261_121, EXAMPLES_CI)
