"""Selects which tests of tests/backend `nox` executes on emulated devices
(ci/emulated.py), by marks at tests.

Tests with `emulated("slow")` run only in `nox -s slow`. These are:

- models whose kinds of tasks another test covers;
- ops whose bodies such models use, and all but a few types or sizes of other ops (`few_emulated`);
- whole files (`pytestmark`): compositions of ops that other tests cover, other decoders, every op
  in every type, the bodies' use of scratch memory, tests that end processes and streams from
  outside (which makes no difference on the device), and tests that open their own emulated device.

Tests with `emulated("gfx942")`, or another architecture, run only on that one: ops and random
programs alternate between architectures, and matrix products run on both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

PLACES = ("slow", "gfx942", "gfx1100")


def places(item: pytest.Item) -> list[str]:
    """Returns the arguments of a test's `emulated` marks. A word that is not in PLACES ends the run
    with an error.
    """
    actual = [word for mark in item.iter_markers("emulated") for word in mark.args or ("nothing",)]
    for word in actual:
        if word not in PLACES:
            message = f"{item.nodeid} is marked emulated({word!r}), none of {PLACES}"
            raise pytest.UsageError(message)
    return actual


def few_emulated(cases: Iterable[Any], *kept: Any) -> list[ParameterSet]:
    """The cases for `parametrize`. On emulated devices `nox` uses only the named cases."""
    return [
        pytest.param(case, marks=() if case in kept else pytest.mark.emulated("slow"))
        for case in cases
    ]
