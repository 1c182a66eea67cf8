"""Collectives that fit any network: topologies in, checked programs of puts and reduces out; and
collectives on NumPy arrays and torch tensors, outside of a model.

Users import `topology` and `synthesize` from here; `ark topo` is the same on the command line. The
package stands on its own, and the plan takes its programs as it takes any other collective. What
works on arrays (`ark.comm.all_reduce(x)`) lies above the runtime, in ark.distributed, and channels
that a model names in ark.ops.communication.channels; they are named here and loaded when asked for.
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
