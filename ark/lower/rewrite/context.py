"""The context of a pass: what it may use besides the graph (machine, options, buffers that the
caller accesses). Created by ark.lower.prepare, read by every pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ark.machine import Machine


@dataclass(frozen=True)
class Context:
    """What a pass may use besides the graph.

    machine: the target machine; in passes over one kernel, it has only the kernel's variant.
    options: the planner's options. kept: ids of buffers that the caller or another kernel reads or
    writes, which a pass must not remove. machines: the machine of each phase (entry point of the
    model), with only the phase's variant; empty before the variants are chosen. alone: True if each
    rank begins iterations independently of its peers.
    """

    machine: Machine
    options: Mapping[str, Any] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    machines: tuple[Machine, ...] = ()
    alone: bool = False
