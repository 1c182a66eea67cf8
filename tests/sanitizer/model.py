"""`python -m tests.sanitizer.model [--variant NAME] [--as-shipped | --whole-warps] ARGUMENTS`: runs
the command `ark ARGUMENTS` with a loop kernel in which every lane arrives at an mbarrier.

In ark's own kernel one lane arrives for its warp, and racecheck may not understand that
(tests.sanitizer), so its reports could be false. With this kernel they cannot be false for that
reason. All kernels have line numbers.

--variant: the decoder is planned for this kernel variant. --as-shipped: the loop is ark's own.
--whole-warps: the loop is ark's own, except that its barriers of all computing threads are separate
functions. Such a barrier has no second code path for diverged warps, which synccheck might not
understand.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys

import cuda.core
from ark_cuda import backend

from ark.backend.codegen.dialect import Dialect
from ark.cli import main as command
from ark.models import generate

# Replacements in the source of the loop and the ring, each at every occurrence of its text.
ROLES = (
    ("ark_barrier_init(&ark_handshake.open, 1u)", "ark_barrier_init(&ark_handshake.open, 32u)"),
    ("ark_handshake.done, ARK_WARPS)", "ark_handshake.done, 32u * ARK_WARPS)"),
    ("ark_handshake.gathered, ARK_WARPS)", "ark_handshake.gathered, 32u * ARK_WARPS)"),
    ("ark_handshake.squared, ARK_WARPS)", "ark_handshake.squared, 32u * ARK_WARPS)"),
    ("if (ark_lane() == 0) ark_barrier_arrive(&ark_handshake", "ark_barrier_arrive(&ark_handshake"),
    ("if (ark_lane() == 0) ark_barrier_arrive(barrier", "ark_barrier_arrive(barrier"),
)
STREAM = (("ark_ring.empty[slot], ARK_WARPS)", "ark_ring.empty[slot], 32u * ARK_WARPS)"),)
RING = (
    (
        "if (ark_lane() == 0) {\n    ark_barrier_arrive(&ark_ring.empty",
        "{\n    ark_barrier_arrive(&ark_ring.empty",
    ),
)
WHOLE = tuple(
    (f"ARK_DEVICE {name}", f"static __device__ __noinline__ {name}")
    for name in ("void ark_sync() {", "bool ark_all(bool v) {")
)


def _replaced(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        assert old in text, f"the source has no {old!r} any more"
        text = text.replace(old, new)
    return text


def every_lane(dialect: Dialect) -> Dialect:
    """Returns CUDA's dialect with a loop in which every lane arrives at an mbarrier."""
    return dataclasses.replace(
        dialect,
        roles=_replaced(dialect.roles, ROLES),
        ring=_replaced(dialect.ring, RING),
        stream=_replaced(dialect.stream, STREAM),
    )


def whole_warps(dialect: Dialect) -> Dialect:
    """Returns CUDA's dialect with a loop whose warps are converged when they synchronise with other
    warps.
    """
    return dataclasses.replace(dialect, prelude=_replaced(dialect.prelude, WHOLE))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sanitizer.model", description=__doc__)
    parser.add_argument("--variant")
    parser.add_argument("--as-shipped", action="store_true")
    parser.add_argument("--whole-warps", action="store_true")
    asked, words = parser.parse_known_args()
    if asked.variant:
        variant = {"variant": asked.variant}
        generate.plans = functools.partial(generate.plans, options=variant)
    if not asked.as_shipped:
        change, dialect = whole_warps if asked.whole_warps else every_lane, backend.dialect
        backend.dialect = lambda arch: change(dialect(arch))
    options = cuda.core.ProgramOptions
    cuda.core.ProgramOptions = lambda **words: options(**words, lineinfo=True)
    return int(command(words) or 0)


if __name__ == "__main__":
    sys.exit(main())
