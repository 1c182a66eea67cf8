"""Every named plan trains six kinds of model as torch does: parameters and moments are equal after
two steps.

The ranks' graphs are interpreted by NumPy in float64. The slow session also runs them in fp32 on
CPU ranks. `python -m tests.plans_of_models` does the same and writes the table.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch")

from tests.plans_of_models import EXACT, FP32, KINDS, NAMES, PAGE, RANKS, in_numpy, on_cpu_ranks
from tests.slow import slow

CASES = list(itertools.product(KINDS, NAMES, RANKS))
DEFAULT = [
    ("convolution", "zero-bubble", 3),
    ("Swin", "co-shard", 3),
    ("Swin", "3f1b", 2),
    ("experts", "expert", 2),
    ("Llama", "interlaced", 2),
    ("Llama", "zero3", 3),
]


@pytest.mark.parametrize(
    ("kind", "plan", "ranks"),
    [pytest.param(*case, marks=() if case in DEFAULT else slow) for case in CASES],
)
def test_in_float64(kind: str, plan: str, ranks: int) -> None:
    assert in_numpy(kind, plan, ranks) < EXACT


@slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "plan", "ranks"), CASES)
def test_on_cpu_ranks(kind: str, plan: str, ranks: int) -> None:
    assert on_cpu_ranks(kind, plan, ranks, verified=True) < FP32


def test_table_has_every_plan_and_kind() -> None:
    text = PAGE.read_text()
    assert all(f"| `{plan}` |" in text for plan in NAMES)
    assert all(f"| {kind} |" in text for kind in KINDS)
