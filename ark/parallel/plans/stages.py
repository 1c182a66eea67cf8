"""Divides blocks into the stages of a pipeline. A stage has consecutive blocks, and the slowest
stage takes the least possible time.

The method is dynamic programming over blocks, which is exact. Called by ark.parallel.plans.splits
and ark.parallel.plans.by_name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from ark.errors import InvalidUsageError


def partition(
    loads: Sequence[float], stages: int, shared: Sequence[bool], sent: Sequence[float] = ()
) -> list[int]:
    """The stage of each block; -1 for blocks that all ranks share.

    loads: the time of each block. sent: for each block, the time in which a stage that begins with
    this block receives the values that it reads (default: none). Raises InvalidUsageError if there
    are fewer blocks than stages.
    """
    own = [i for i, all_ranks in enumerate(shared) if not all_ranks]
    if len(own) < stages:
        raise InvalidUsageError(
            f"a pipeline of {stages} stages needs as many blocks, but the model has {len(own)}; "
            "use fewer stages"
        )
    sums = [0.0, *itertools.accumulate(loads[i] for i in own)]
    count = len(own)
    best = [0.0] + [math.inf] * count
    cuts: list[list[int]] = []
    for _ in range(stages):
        after, cut = [math.inf] * (count + 1), [0] * (count + 1)
        for end in range(1, count + 1):
            for begin in range(end):
                waited = sent[own[begin]] if sent and begin else 0.0
                slowest = max(best[begin], sums[end] - sums[begin] + waited)
                if slowest < after[end]:
                    after[end], cut[end] = slowest, begin
        best, cuts = after, [*cuts, cut]
    stage_of = [-1] * len(loads)
    end = count
    for stage in reversed(range(stages)):
        begin = cuts[stage][end]
        for i in own[begin:end]:
            stage_of[i] = stage
        end = begin
    return stage_of
