"""``kvtier bench``: measures tiers on the user's own storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from cyclopts import App, Parameter

from kvtier.errors import Misuse
from kvtier.tools.cli.options import DEFAULTS, JsonFile, Size, Sizes

bench = App(
    help="Measure tiers on storage of your own. Machines are shared and noisy: quote the ratios, "
    "never a time by itself.",
    default_parameter=DEFAULTS,
    group_parameters="Options",
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Settings of a measurement."""

    tier: Annotated[tuple[str, ...], Parameter(metavar="JSON")]
    """an entry of secondary_tiers whose server runs, or whose folder exists: redis, s3, mooncake,
    disk or fs. Its blocks get names of their own and are removed. Repeat it for several"""

    block_bytes: Sizes = "64KiB,1MiB"
    """block sizes, measured one after the other"""

    bytes: Size = "256MiB"
    """bytes that each side moves in one leg; the server must have room for them"""

    rounds: Annotated[int, Parameter(metavar="N")] = 5
    """number of runs; figures are their medians"""

    protection: bool = False
    """measure signed and encrypted blocks as well, with random keys (disk: encrypted ones)"""

    compression: bool = False
    """measure compressed blocks as well; all sides then move bytes that compress like keys and
    values of a model in bfloat16"""


@bench.command
def tier(*, options: BenchOptions, json: JsonFile = None) -> int:
    """Measure any tier: redis, s3 and mooncake beside their plain client, disk and fs beside files.

    The plain client library works on the same server, and plain files on the same disk.
    """
    from kvtier.plugin_api.sizes import read_bytes  # noqa: PLC0415 - only if it is asked for
    from kvtier.tools.bench.tier import TierBenchOptions  # noqa: PLC0415 - as above
    from kvtier.tools.bench.tier_command import run  # noqa: PLC0415 - as above
    from kvtier.tools.terminal import check_can_write  # noqa: PLC0415 - as above

    if options.rounds < 1:
        raise Misuse(f"--rounds {options.rounds} must be at least 1.")
    if json:
        check_can_write(json)
    run(
        options.tier,
        options.block_bytes,
        TierBenchOptions(
            leg_bytes=read_bytes(options.bytes, "--bytes"),
            rounds=options.rounds,
            protection=options.protection,
            compression=options.compression,
        ),
        json,
    )
    return 0
