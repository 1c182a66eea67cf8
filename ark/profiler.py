"""ARK's profiler: times a plan and its processor groups.

`python -m ark.profiler --plan FILE` or ark.Profiler(plan).run().
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

from ark.errors import BaseError, InvalidUsageError
from ark.runtime.api.plan import Plan
from ark.runtime.executor import Executor
from ark.runtime.runtime import Runtime

__all__ = ["Plan", "Profiler", "main", "timeit"]


def timeit(plan: Plan, iter: int, loop_mode: bool, warmup: int = 3) -> float:
    """Seconds per iteration, by the host's clock, after `warmup` iterations."""
    with Runtime() as runtime:
        runtime.launch(plan=plan, loop_mode=loop_mode)
        if warmup:
            runtime.run(iter=warmup)
        begin = time.perf_counter()
        runtime.run(iter=iter)
        return (time.perf_counter() - begin) / iter


class Profiler:
    """Times a plan and prints the results, in microseconds.

    plan: a result of Planner.plan. Raises InvalidUsageError for anything else.

    Examples:
        >>> y = ark.relu(ark.tensor([64]))
        >>> ark.Profiler(ark.Planner().plan()).run(iter=2)
        whole plan: ... us per iteration (2 iterations)
    """

    def __init__(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise InvalidUsageError(
                f"a Profiler times an ark.Plan, not {type(plan).__name__}; create one with "
                "ark.Planner().plan()"
            )
        self.plan = plan

    def run(
        self,
        iter: int = 1000,
        loop_mode: bool = True,
        profile_processor_groups: bool = False,
        target_processor_groups: Sequence[int] | None = None,
    ) -> None:
        """Prints microseconds per iteration and, if requested, the busy time of each processor
        group.

        target_processor_groups: the numbers of the groups, by default all.
        """
        seconds = timeit(self.plan, iter, loop_mode)
        print(f"whole plan: {seconds * 1e6:.2f} us per iteration ({iter} iterations)")
        if not profile_processor_groups:
            return
        busy = self._busy(min(iter, 100))
        for number, group in enumerate(self.plan.processor_groups):
            if target_processor_groups is not None and number not in target_processor_groups:
                continue
            ops = [t["TaskId"] for t in group["ResourceGroups"][0]["TaskGroups"]]
            total = sum(busy[op] for op in ops)
            print(
                f"processor group {number} {group['ProcessorRange']}: {total:.2f} us busy per "
                f"iteration, summed over processors ({len(ops)} ops)"
            )

    def _busy(self, iterations: int) -> dict[int, float]:
        """For each op the microseconds per iteration that its tasks take, from a trace."""
        busy_s: dict[int, float] = defaultdict(float)
        with Runtime() as runtime:
            runtime.launch(plan=self.plan, loop_mode=False, record=True)
            if runtime.executor is None:
                return busy_s
            assert isinstance(runtime.executor, Executor)  # loop kernels record traces
            runtime.run(iter=iterations)
            listing = runtime.executor.tables.listing
            counted = 1
            for records in runtime.executor.trace():
                for record in records:
                    task = listing[int(record["task"])][2]
                    busy_s[task.op] += (int(record["end"]) - int(record["begin"])) / 1e3
                    counted = max(counted, int(record["iteration"]) + 1)
        return {op: value / counted for op, value in busy_s.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="ark.profiler", description="ARK Profiler: times a plan")
    parser.add_argument("--plan", required=True, help="a plan file, as `ark plan -o` writes it")
    parser.add_argument("--iter", type=int, default=1000)
    parser.add_argument("--loop_mode", action="store_true", help="one persistent launch")
    parser.add_argument("--profile_processor_groups", action="store_true")
    parser.add_argument("--target_processor_groups", help="numbers, separated by commas")
    args = parser.parse_args(argv)
    targets = args.target_processor_groups
    try:
        Profiler(Plan.from_file(args.plan)).run(
            iter=args.iter,
            loop_mode=args.loop_mode,
            profile_processor_groups=args.profile_processor_groups,
            target_processor_groups=[int(n) for n in targets.split(",")] if targets else None,
        )
    except BaseError as error:
        print(f"ark: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
