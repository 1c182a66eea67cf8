"""Communication for users: topologies, synthesis of collective programs, and channels in models.

`topology` and `synthesize` make a collective program for a network, `program` is a language for
writing one, and `channel` and `symmetric` add communication to a model explicitly. The collectives
on arrays are in ark.distributed; their names here are deprecated.
"""

import warnings
from typing import Any

from ark import distributed
from ark.collective import topology
from ark.collective.programs.language import program
from ark.collective.synthesis import algorithms, synthesize
from ark.ops.communication.channels import channel, symmetric


def __getattr__(name: str) -> Any:
    if name not in distributed.__all__:
        raise AttributeError(f"module 'ark.comm' has no attribute {name!r}")
    warnings.warn(
        f"ark.comm.{name} is deprecated and ends with version 0.3; use ark.distributed.{name}",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(distributed, name)


__all__ = ["algorithms", "channel", "program", "symmetric", "synthesize", "topology"]
