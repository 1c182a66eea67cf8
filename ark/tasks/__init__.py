"""The task kinds. A task computes one tile of an op on one processor. Its kind, such as `matmul` or
`row_norm`, states the memory that the task accesses, its cost, and the C++ source of its device
function (ark.plan.kind). Lowering emits tasks of these kinds, the verifier and the source writer
call the kinds.

There is one module per family. Its docstring lists each kind's static parameters (params), its
operands with their shapes, and the meaning of a task's coordinates (coord). A vendor may replace a
kind's source, but the accesses are always defined here, because the verifier relies on them.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):  # each module registers its kinds
    import_module(f"ark.tasks.{_module.name}")
