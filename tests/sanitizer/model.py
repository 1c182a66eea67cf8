"""`python -m tests.sanitizer.model [--variant NAME] [--as-shipped] ARGUMENTS`: the command
`ark ARGUMENTS` with a loop kernel in which every lane arrives at an mbarrier, where ark's own lets
one lane arrive for its warp, and with line numbers. What racecheck reports of it is not for want of
following that lane (tests.sanitizer). --variant: the decoder is planned for this kernel variant.
--as-shipped: the loop is ark's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys

import cuda.core
from ark_cuda import backend

from ark.cli import main as command
from ark.codegen.dialect import Dialect
from ark.models import generate

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
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizer.model", description=__doc__)
    parser.add_argument("--variant")
    parser.add_argument("--as-shipped", action="store_true")
    asked, words = parser.parse_known_args()
    if asked.variant:
        options = {"variant": asked.variant}
        generate.plans = functools.partial(generate.plans, options=options)
    if not asked.as_shipped:
        _let_every_lane_arrive()
    return int(command(words) or 0)


def _let_every_lane_arrive() -> None:
    dialect, options = backend.dialect, cuda.core.ProgramOptions
    backend.dialect = lambda arch: every_lane(dialect(arch))
    cuda.core.ProgramOptions = lambda **words: options(**words, lineinfo=True)


if __name__ == "__main__":
    sys.exit(main())
