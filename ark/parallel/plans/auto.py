"""Finds the fastest plan, over a number of ranks, that fits into memory.

It tries all meshes of ranks with up to three axes: one for a pipeline, one for copies of the model
(data parallelism), and one along which ops are split. Ranks that split ops have neighbouring
numbers. The numbers of ranks in consecutive stages of a pipeline are farthest apart. A candidate is
not scheduled if its lower bound exceeds the best time so far. Called by `ark parallelize --plan
auto`.
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
COPIED = ("data", "zero1", "zero2", "zero3", "co-shard")
SPLIT = ("sequence", "megatron", "auto")
MAX_STAGES = 16  # the largest number of pipeline stages that is tried
REFINED_CANDIDATES = 4  # this many of the best named plans are searched again without named rules
Candidate = tuple[tuple[int, ...], tuple[str, ...], Work]


def candidates(ranks: int, work: Work, mesh: Sequence[int] | None = None) -> Iterator[Candidate]:
    """All candidates, those first whose evaluation takes the least time. A candidate is a mesh of
    ranks, with the name of a plan for each axis: a pipeline, copies of the model, or splits of ops.
    mesh: if given, only candidates with this mesh.
    """
    recompute_choices = (False, True) if work.training and not work.recompute else (work.recompute,)
    copied = COPIED if work.training else ("data", "zero3")
    for recompute in recompute_choices:
        todo = Work(work.training, work.batch, recompute)
        if mesh is not None:
            kinds = (SCHEDULES, copied, SPLIT)
            names = tuple(itertools.chain(*kinds))
            for chosen in itertools.product(names, repeat=len(mesh)):
                repeated = recompute != recompute_choices[0] and "co-shard" in chosen
                if not repeated and all(sum(n in kind for n in chosen) <= 1 for kind in kinds[:2]):
                    yield tuple(mesh), chosen, todo
            continue
        for split in _divisors(ranks):
            for copies in _divisors(ranks // split):
                depth = ranks // split // copies
                if depth > MAX_STAGES:
                    continue
                for schedule in SCHEDULES if depth > 1 else SCHEDULES[:1]:
                    for kind in copied if copies > 1 else _of_one(copied):
                        if kind == "co-shard" and recompute != recompute_choices[0]:
                            continue  # co-shard always recomputes
                        for rule in SPLIT if split > 1 else SPLIT[:1]:
                            yield (depth, copies, split), (schedule, kind, rule), todo


def _of_one(copied: Sequence[str]) -> list[str]:
    """The kinds of copies (data parallelism) to try if there is only one copy of the model. With
    one copy, all kinds give the same plan as `data`, except co-shard, which also divides the work
    of a copy.
    """
    return [name for name in copied if name in ("data", "co-shard")]


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
    """Returns the fastest plan that fits, and all predictions that were computed, sorted by time.

    Raises PlanError if no plan fits, with the reason of the last one.
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
    predictions: list[Prediction] = []

    def attempt(candidate: Candidate, refit: bool) -> None:
        nonlocal reason
        shape, names, how = candidate
        try:
            predictions.append(predict(splits, shape, names, target, how, memory_bytes, refit))
        except REFUSALS as error:
            reason = error

    for us, _, candidate in sorted(todo, key=lambda entry: entry[:2]):
        if us >= min((p.us for p in predictions), default=math.inf):
            break
        attempt(candidate, False)
    # The search over all splits of ops is not restricted by the rules of named plans. It starts
    # from the best named plans, or from all candidates if none fits into memory.
    near = [
        (p.mesh, p.names, p.work)
        for p in sorted(predictions, key=lambda p: p.us)[:REFINED_CANDIDATES]
    ]
    for shape, names, how in near or list(candidates(ranks, work, mesh))[:REFINED_CANDIDATES]:
        freed = tuple("auto" if name in SPLIT else name for name in names)
        if freed != names or not near:
            attempt((shape, freed, how), True)
    if not predictions:
        raise PlanError(f"no plan over {ranks} ranks fits: {reason or 'too little memory'}")
    predictions.sort(key=lambda p: (p.us, p.peak, p.names))
    return predictions[0], predictions
