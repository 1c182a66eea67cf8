"""torch's modules and graphs as kernels of ark; see docs/torch.md.

`compile` has the public functions; `graph` converts a torch graph, `program` runs a kernel on
torch's tensors, and `iterate` runs several iterations per call. The operators are in a table (in
`values`), to which the modules elementwise, movement, lookup, reductions, products and attention
add their entries.
"""

from ark.interop.torch.compile import backend
from ark.interop.torch.modes import inference_model, training_model
from ark.interop.torch.module import Module, from_torch
from ark.interop.torch.options import Options
from ark.interop.torch.stages import block

__all__ = [
    "Module",
    "Options",
    "backend",
    "block",
    "from_torch",
    "inference_model",
    "training_model",
]
