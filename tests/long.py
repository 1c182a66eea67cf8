"""Divides the tests into two parts, which run one after the other in CI.

tests/long.txt lists the long tests, by measured duration. `pytest` without paths omits them, and
`pytest --part long` runs only them. All other tests, and therefore new ones, are in the default
part. With paths, `pytest` runs all tests of these. `python ci/durations.py` writes the list.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tests/long.txt"
PARTS = DEFAULT, LONG, ALL = ("default", "long", "all")


@cache
def listed() -> frozenset[str]:
    """The long tests, each as `tests/.../test_file.py::test_name`, which means all cases."""
    return frozenset(LIST.read_text().split())


@cache
def files() -> frozenset[str]:
    """The files that have long tests."""
    return frozenset(name.partition("::")[0] for name in listed())


def function(nodeid: str) -> str:
    """The node ID of the function of a test case."""
    return nodeid.partition("[")[0]


def part_of(nodeid: str) -> str:
    """The part of a test with this node ID."""
    return LONG if function(nodeid) in listed() else DEFAULT


def runs(part: str, nodeid: str) -> bool:
    """Whether a test belongs to a run of this part."""
    return part in (ALL, part_of(nodeid))
