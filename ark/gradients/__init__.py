"""Gradients of graphs: `ark.grad`, and a rule for every op; see docs/training.md.

`reverse` processes a graph backwards, `regions` keeps gradients by memory region, and the other
modules hold the rules: elementwise (with derivatives), movement, windows, reductions, products,
ranks, custom. optim: optimizers.
"""

from ark.gradients import custom as custom
from ark.gradients import optim
from ark.gradients import ranks as ranks
from ark.gradients import reductions as reductions
from ark.gradients import windows as windows
from ark.gradients.reverse import grad

__all__ = ["grad", "optim"]
