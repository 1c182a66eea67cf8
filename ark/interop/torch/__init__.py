"""torch's modules and graphs as kernels of ark; docs/torch.md.

compile holds what users call; graph walks a torch graph, program runs a kernel on torch's tensors.
The operators are a table (values) that elementwise, movement, reductions and products fill.
"""

from ark.interop.torch.compile import Module, backend, from_torch

__all__ = ["Module", "backend", "from_torch"]
