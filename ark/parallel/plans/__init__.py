"""Plans that have names, plans of the user's, and the search for the best: `parallelize`."""

from ark.parallel.plans.parallelize import PLANS, Parallelized, parallelize
from ark.parallel.plans.pipelined import pipelined

__all__ = ["PLANS", "Parallelized", "parallelize", "pipelined"]
