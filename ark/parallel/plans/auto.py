"""The best plan over so many ranks: all ways to share them between a pipeline, copies of the model
and splits of its ops, the fastest that fits.

Ranks that split ops are neighbours, pipelines reach farthest. What no order of its blocks could
make fast enough is not scheduled. Called by `ark parallelize --plan auto`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from ark.errors import REFUSALS, BaseError, PlanError
from ark.parallel.plans.predict import bounds, predict
from ark.parallel.plans.prediction import Prediction, Target, Work
from ark.parallel.plans.splits import Splits

SCHEDULES = ("1f1b", "interleaved", "zero-bubble", "gpipe", "chimera", "interlaced")
COPIED = ("data", "zero1", "zero2", "zero3")
SPLIT = ("sequence", "megatron", "auto")
DEEPEST = 16  # stages of a pipeline that are tried
NEAR = 4  # of the best, that are tried with free choices
Candidate = tuple[tuple[int, ...], tuple[str, ...], Work]


def candidates(ranks: int, work: Work, mesh: Sequence[int] | None = None) -> Iterator[Candidate]:
    """Every mesh and names that are tried, cheapest to judge first.

    mesh: keep to it; its axes are then a pipeline, copies, or splits.
    """
    again = (False, True) if work.training and not work.recompute else (work.recompute,)
    copied = COPIED if work.training else ("data", "zero3")
    for recompute in again:
        todo = Work(work.training, work.batch, recompute)
        if mesh is not None:
            kinds = (SCHEDULES, copied, SPLIT)
            names = tuple(itertools.chain(*kinds))
            for chosen in itertools.product(names, repeat=len(mesh)):
                if all(sum(n in kind for n in chosen) <= 1 for kind in kinds[:2]):
                    yield tuple(mesh), chosen, todo
            continue
        for split in _divisors(ranks):
            for copies in _divisors(ranks // split):
                depth = ranks // split // copies
                if depth > DEEPEST:
                    continue
                for schedule in SCHEDULES if depth > 1 else SCHEDULES[:1]:
                    for kind in copied if copies > 1 else copied[:1]:
                        for rule in SPLIT if split > 1 else SPLIT[:1]:
                            yield (depth, copies, split), (schedule, kind, rule), todo


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def best(
    splits: Splits,
    ranks: int,
    target: Target,
    work: Work,
    memory_bytes: int | None = None,
    mesh: Sequence[int] | None = None,
) -> tuple[Prediction, list[Prediction]]:
    """The fastest plan that fits, and all that were predicted on the way to it, by time.

    PlanError if nothing fits, with the reason of the last that did not.
    """
    limit = math.inf if memory_bytes is None else memory_bytes
    todo: list[tuple[float, int, Candidate]] = []
    reason: BaseError | None = None
    for number, candidate in enumerate(candidates(ranks, work, mesh)):
        try:
            us, held = bounds(splits, candidate[0], candidate[1], target, candidate[2])
        except REFUSALS as error:
            reason = error
            continue
        if held <= limit:
            todo.append((us, number, candidate))
    found: list[Prediction] = []

    def attempt(candidate: Candidate, refit: bool) -> None:
        nonlocal reason
        shape, names, how = candidate
        try:
            found.append(predict(splits, shape, names, target, how, memory_bytes, refit))
        except REFUSALS as error:
            reason = error

    for us, _, candidate in sorted(todo, key=lambda entry: entry[:2]):
        if us >= min((p.us for p in found), default=math.inf):
            break
        attempt(candidate, False)
    # Free choices within the memory: beside the best that have names, and where none of them fits.
    near = [(p.mesh, p.names, p.work) for p in sorted(found, key=lambda p: p.us)[:NEAR]]
    for shape, names, how in near or list(candidates(ranks, work, mesh))[:NEAR]:
        freed = tuple("auto" if name in SPLIT else name for name in names)
        if freed != names or not near:
            attempt((shape, freed, how), True)
    if not found:
        raise PlanError(f"no plan over {ranks} ranks fits: {reason or 'too little memory'}")
    found.sort(key=lambda p: (p.us, p.peak, p.names))
    return found[0], found
