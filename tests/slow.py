"""What the default run leaves out, or does less of, because it is slow and rarely fails.

`slow` marks a test that only `nox -s slow` runs (`pytest -m slow`); `few` marks all cases of a list
but some, `in_turns` all pairs of a case and an architecture but one a case (or one for some of the
cases); `examples` says how many random cases a test looks at: all of them in that session, a fifth
in the default run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet

SLOW = os.environ.get("ARK_SLOW_TESTS") == "1"
slow = pytest.mark.slow


def examples(count: int) -> int:
    """So many random cases in the slow session, a fifth of them in the default run."""
    return count if SLOW else -(-count // 5)


def _spaced(count: int, total: int) -> list[int]:
    """The places of `count` of `total` cases, evenly spaced from the first on."""
    return [place * total // count for place in range(count)]


def few(count: int, cases: Iterable[Any]) -> list[ParameterSet]:
    """The cases for `parametrize`, of which so many run by default: every so manieth, from the
    first on. A tuple's values are those of several parameters.
    """
    listed = list(cases)
    kept = _spaced(count, len(listed))
    rows = (case if isinstance(case, tuple) else (case,) for case in listed)
    return [
        pytest.param(*row, marks=() if place in kept else slow) for place, row in enumerate(rows)
    ]


def in_turns(
    archs: Sequence[Any], cases: Iterable[tuple[Any, ...]], count: int | None = None
) -> list[ParameterSet]:
    """Every case for every architecture. The default run has one architecture per case, in turns,
    and only `count` of the cases, evenly spaced, if it is given.
    """
    listed = list(cases)
    kept = _spaced(count or len(listed), len(listed))
    turn = {place: archs[i % len(archs)] for i, place in enumerate(kept)}
    return [
        pytest.param(arch, *case, marks=() if turn.get(place, ...) == arch else slow)
        for place, case in enumerate(listed)
        for arch in archs
    ]
