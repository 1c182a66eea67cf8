"""`python -m tests.sanitizer.model ARGUMENTS`: the command `ark ARGUMENTS` with a loop kernel in
which every lane arrives at an mbarrier, where ark's own lets one lane arrive for its warp, and with
line numbers. What racecheck reports of it is not for want of following that lane (tests.sanitizer).
"""

from __future__ import annotations

import dataclasses
import sys

import cuda.core
from ark_cuda import backend

from ark.cli import main as command
from ark.codegen.dialect import Dialect

# What is replaced in the source of the loop and the ring, each as often as it stands there.
ROLES = (
    ("ark_barrier_init(&ark_handshake.open, 1u)", "ark_barrier_init(&ark_handshake.open, 32u)"),
    ("ark_handshake.done, ARK_WARPS)", "ark_handshake.done, 32u * ARK_WARPS)"),
    ("ark_handshake.gathered, ARK_WARPS)", "ark_handshake.gathered, 32u * ARK_WARPS)"),
    ("if (ark_lane() == 0) ark_barrier_arrive(&ark_handshake", "ark_barrier_arrive(&ark_handshake"),
)
STREAM = (
    ("ark_ring.empty[slot], ARK_WARPS)", "ark_ring.empty[slot], 32u * ARK_WARPS)"),
    (
        "if (ark_lane() == 0) {\n    ark_barrier_arrive(&ark_ring.empty",
        "{\n    ark_barrier_arrive(&ark_ring.empty",
    ),
)


def _replaced(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        assert old in text, f"the source has no {old!r} any more"
        text = text.replace(old, new)
    return text


def every_lane(made: Dialect) -> Dialect:
    """The dialect with every lane arriving."""
    return dataclasses.replace(
        made, roles=_replaced(made.roles, ROLES), stream=_replaced(made.stream, STREAM)
    )


def main() -> int:
    dialect, options = backend.dialect, cuda.core.ProgramOptions
    backend.dialect = lambda arch: every_lane(dialect(arch))
    cuda.core.ProgramOptions = lambda **words: options(**words, lineinfo=True)
    return int(command(sys.argv[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main())
