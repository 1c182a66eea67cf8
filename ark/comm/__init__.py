"""Collectives for any network: synthesis of checked programs of puts and reduces from topologies.

And collectives on NumPy arrays and torch tensors, outside of a model.

Users import `topology` and `synthesize` from here; `ark topo` is the same on the command line. The
package does not depend on plans, and the planner accepts its programs like any other collective.
Functions on arrays (`ark.comm.all_reduce(x)`) are in ark.distributed, above the runtime, and
channels of models in ark.ops.communication.channels; both are imported when they are used.
"""

import importlib

from ark.collective.language import program
from ark.comm import topology
from ark.comm.synthesis import algorithms, synthesize

_ON_ARRAYS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "barrier",
    "broadcast",
    "group",
    "recv",
    "reduce_scatter",
    "send",
)
_IN_MODELS = ("channel", "symmetric")


def __getattr__(name: str) -> object:
    if name in _ON_ARRAYS:
        return getattr(importlib.import_module("ark.distributed.functions"), name)
    if name in _IN_MODELS:
        return getattr(importlib.import_module("ark.ops.communication.channels"), name)
    raise AttributeError(f"module 'ark.comm' has no attribute {name!r}")


__all__ = ["algorithms", "program", "synthesize", "topology", *_ON_ARRAYS, *_IN_MODELS]
