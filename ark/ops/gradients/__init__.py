"""Gradients of graphs: `ark.grad`, and a rule for every op; see docs/training.md.

`reverse` processes a graph backwards, `regions` keeps gradients by memory region, and the other
modules hold the rules: elementwise (with derivatives), movement, windows, reductions, products,
ranks, custom. optim: optimizers.
"""

from ark.ops.gradients import custom as custom
from ark.ops.gradients import optim
from ark.ops.gradients import ranks as ranks
from ark.ops.gradients import reductions as reductions
from ark.ops.gradients import windows as windows
from ark.ops.gradients.reverse import grad

__all__ = ["grad", "optim"]
