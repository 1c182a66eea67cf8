"""What the default run takes of tests/backend on emulated devices (ci/emulated.py): marks at tests.

`emulated("slow")` is left to `nox -s slow`: of what generates with a model, models whose tasks are
of the same kinds as those of one that stays; ops whose bodies those have that stay, and of one op
in several types or sizes all but a few (`few_emulated`); and, by file (a `pytestmark`),
compositions of ops that others cover, other decoders, every op in every type, what bodies use of
scratch memory, what ends processes and streams from outside (on the device an early end of a stream
is the same), and those that bring an emulated device of their own, which need no second one.
`emulated("gfx942")`, or another architecture, is left to that one: ops and random programs take
turns, matrix products run on both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

PLACES = ("slow", "gfx942", "gfx1100")


def places(item: pytest.Item) -> list[str]:
    """Marks a test with these words. A word that is not in PLACES ends the run."""
    actual = [word for mark in item.iter_markers("emulated") for word in mark.args or ("nothing",)]
    for word in actual:
        if word not in PLACES:
            message = f"{item.nodeid} is marked emulated({word!r}), none of {PLACES}"
            raise pytest.UsageError(message)
    return actual


def few_emulated(cases: Iterable[Any], *kept: Any) -> list[ParameterSet]:
    """The cases for `parametrize`. On emulated devices the default run uses only the named ones."""
    return [
        pytest.param(case, marks=() if case in kept else pytest.mark.emulated("slow"))
        for case in cases
    ]
