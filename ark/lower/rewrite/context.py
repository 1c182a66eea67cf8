"""The facts beside the graph that a pass may use: machine, options, external buffers. Made by
ark.lower.prepare, read by every pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ark.machine import Machine


@dataclass(frozen=True)
class Context:
    """What a pass may know beside the graph.

    machine: the machine that is planned for; in passes over one kernel, with the one variant that
    the kernel runs under. options: the planner's. kept: ids of buffers that the caller or another
    kernel reads or writes, so that their contents must be written. machines: by phase, each with
    its one variant; empty before the variants are chosen. alone: each rank begins iterations by
    itself.
    """

    machine: Machine
    options: Mapping[str, Any] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    machines: tuple[Machine, ...] = ()
    alone: bool = False
