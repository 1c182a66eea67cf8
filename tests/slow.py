"""Selects the tests and cases that `nox` omits because they are slow and rarely fail.

`slow` marks a test that only `nox -s slow` runs (`pytest -m slow`). `few` marks all but a few cases
of a list. `in_turns` pairs cases with architectures and marks all pairs except one for each case
(or for some of the cases). `examples` is the number of random cases of a test: all of them in the
slow session, a fifth in others.
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
    """The number of random cases: the given number in the slow session, a fifth of it in the
    other sessions.
    """
    return count if SLOW else -(-count // 5)


def _spaced(count: int, total: int) -> list[int]:
    """The indices of `count` of `total` cases, evenly spaced from the first on."""
    return [place * total // count for place in range(count)]


def few(count: int, cases: Iterable[Any]) -> list[ParameterSet]:
    """The cases for `parametrize`, of which the given number runs by default, evenly spaced from
    the first on. A tuple has the values of several parameters.
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
    """Every case for every architecture. Outside of the slow session each case has one
    architecture, in turn. If `count` is given, only that many cases run, evenly spaced.
    """
    listed = list(cases)
    kept = _spaced(count or len(listed), len(listed))
    turn = {place: archs[i % len(archs)] for i, place in enumerate(kept)}
    return [
        pytest.param(arch, *case, marks=() if turn.get(place, ...) == arch else slow)
        for place, case in enumerate(listed)
        for arch in archs
    ]
