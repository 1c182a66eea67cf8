"""Collectives outside of a model, on NumPy arrays and torch tensors.

The package offers functions (`ark.distributed.all_reduce(x)`), groups of ranks, and a backend "ark"
for torch.distributed, which `import ark.distributed.torch` registers.
"""

from ark.distributed.functions import (
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_v,
    barrier,
    broadcast,
    group,
    recv,
    reduce_scatter,
    register,
    run_program,
    send,
    unregister,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "group",
    "recv",
    "reduce_scatter",
    "register",
    "run_program",
    "send",
    "unregister",
]
