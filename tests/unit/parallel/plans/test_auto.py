"""The plan that `auto` chooses compared with all named plans, over several models and meshes."""

from __future__ import annotations

import functools
import itertools

import pytest

from ark.backend import registry
from ark.errors import BaseError
from ark.ir.dtype import by_name
from ark.models.build import whole_pass
from ark.models.config import builtin_config
from ark.parallel.pipeline.named import PIPELINES
from ark.parallel.plans.auto import best, candidates
from ark.parallel.plans.predict import bounds, predict
from ark.parallel.plans.prediction import COPIES, Target, Work
from ark.parallel.plans.rules import PLANS
from ark.parallel.plans.splits import Splits
from tests.slow import slow

FIRST = (next(iter(PIPELINES)), next(iter(COPIES)), next(iter(PLANS)))
INNER = [name for name in PLANS if name != "auto" and name not in COPIES]


@functools.cache
def splits(model: str) -> Splits:
    return Splits(whole_pass(builtin_config(model), by_name("bf16"), 512))


def every_mesh(ranks: int) -> list[tuple[int, int, int]]:
    """Returns all (pipeline, copies, split) whose product is `ranks`."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [m for m in itertools.product(sizes, repeat=3) if m[0] * m[1] * m[2] == ranks]


def test_pipelines_co_shard_and_splits_are_tried_together() -> None:
    """No candidate occurs twice, although co-shard recomputes with and without the option."""
    tried = list(candidates(8, Work(True, 8)))
    assert len(set(tried)) == len(tried)
    for names, mesh in (
        (("1f1b", "co-shard", "megatron"), (2, 2, 2)),
        (("1f1b", "co-shard", "sequence"), (8, 1, 1)),
    ):
        assert [names == c[1] and mesh == c[0] for c in tried].count(True) == 1


@pytest.mark.parametrize(
    ("model", "ranks", "machine", "link", "memory", "work"),
    [
        ("llama-3.2-1b", 4, "h100", 450.0, 80e9, Work(True, 8)),
        pytest.param("llama-3.2-1b", 8, "h100", 25.0, 16e9, Work(True, 16), marks=slow),
        pytest.param("llama-3.2-1b", 8, "h100", 450.0, 80e9, Work(False, 8), marks=slow),
        pytest.param("llama-3.1-8b", 8, "h100", 450.0, 80e9, Work(True, 32), marks=slow),
        pytest.param("llama-3.1-8b", 16, "mi300x", 50.0, 190e9, Work(True, 32), marks=slow),
        pytest.param("llama-3.1-70b", 64, "h100", 450.0, 80e9, Work(True, 64), marks=slow),
    ],
)
def test_auto_is_within_a_twentieth_of_every_name(
    model: str, ranks: int, machine: str, link: float, memory: float, work: Work
) -> None:
    """The plan that `auto` chooses is at most a twentieth slower than every named plan. Over many
    ranks, a named plan is not predicted if its lower bound is above the chosen plan's time.
    """
    target = Target(registry.machine(machine), link, min(link, 50.0), 8)
    actual, _ = best(splits(model), ranks, target, work, int(memory))
    tried: list[float] = []
    for mesh in every_mesh(ranks):
        for names in itertools.product(PIPELINES, COPIES, INNER):
            axes = zip(mesh, names, FIRST, strict=True)
            if any(n == 1 and name != first for n, name, first in axes):
                continue  # on an axis of one rank all names are the same
            for recompute in {work.recompute, work.training}:
                how = Work(work.training, work.batch, recompute)
                try:
                    if (
                        ranks > 16
                        and bounds(splits(model), mesh, names, target, how)[0] > actual.us
                    ):
                        continue
                    tried.append(predict(splits(model), mesh, names, target, how, int(memory)).us)
                except BaseError:
                    continue
    assert len(tried) > 20 and actual.us <= 1.05 * min(tried)
