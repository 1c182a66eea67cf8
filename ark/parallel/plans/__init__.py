"""Named plans, plans of the user, and the search for the fastest plan: `parallelize`."""

from ark.parallel.plans.by_name import place_of
from ark.parallel.plans.coconet import autotune
from ark.parallel.plans.parallelize import Parallelized, parallelize
from ark.parallel.plans.pipelined import pipelined
from ark.parallel.plans.rules import PLANS
from ark.parallel.plans.spread import spread

__all__ = ["PLANS", "Parallelized", "autotune", "parallelize", "pipelined", "place_of", "spread"]
