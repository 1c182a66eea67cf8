"""The path ark.profiler, for `python -m ark.profiler`; the profiler itself is ark.api.profiler."""

import sys

from ark.api.profiler import Plan, Profiler, main, timeit

__all__ = ["Plan", "Profiler", "main", "timeit"]

if __name__ == "__main__":
    sys.exit(main())
