"""Placements that have names, as the Tessel paper draws them: V, X, M, NN and K.

Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule
Search" (HPCA 2024). Each stage's forward block takes one unit of memory of its device and its
backward block gives that back; without backward blocks (inference) nothing is held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ark.errors import InvalidUsageError
from ark.parallel.pipeline.placement import MOST_DEVICES, Block, Placement


class _Chains:
    """Collects blocks, each after those before it in its chain."""

    def __init__(self, devices: int, forward: int, backward: int, inference: bool) -> None:
        self.devices, self.inference = devices, inference
        self.spans = {"f": forward, "b": backward}
        self.blocks: list[Block] = []

    def add(self, name: str, way: str, devices: Sequence[int], after: Sequence[str]) -> str:
        """A block: a stage on one device, or shared by all devices in the time of a unit."""
        label = f"{way}{name}"
        whole = len(devices) > 1
        held = 0 if self.inference or name in ("in", "mid") else 1
        memory = held if way == "f" else -held
        span = 1 if whole else self.spans[way]
        self.blocks.append(Block(label, span, memory, tuple(devices), tuple(after)))
        return label

    def chain(self, stages: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Forward through the stages, and back."""
        last: list[str] = []
        for way, ordered in (("f", list(stages)), ("b", list(stages)[::-1])):
            if way == "f" or not self.inference:
                for name, devices in ordered:
                    last = [self.add(name, way, devices, last)]


def _v(made: _Chains) -> None:
    """Stage after stage, forward and back (1F1B's placement)."""
    made.chain([(str(d), [d]) for d in range(made.devices)])


def _x(made: _Chains) -> None:
    """Two pipelines, one from either end (Chimera's placement)."""
    stages = [(str(d), [d]) for d in range(made.devices)]
    made.chain([(f"{name}.down", devices) for name, devices in stages])
    made.chain([(f"{name}.up", devices) for name, devices in stages[::-1]])


def _m(made: _Chains) -> None:
    """A first layer on all devices, as a large embedding is, then stages."""
    stages = [(str(d), [d]) for d in range(made.devices)]
    made.chain([("in", range(made.devices)), *stages])


def _nn(made: _Chains) -> None:
    """A layer on all devices before the first stage, and again half-way (encoder and decoder)."""
    stages = [(str(d), [d]) for d in range(made.devices)]
    half, every = made.devices // 2, range(made.devices)
    made.chain([("in", every), *stages[:half], ("mid", every), *stages[half:]])


def _k(made: _Chains) -> None:
    """Two branches on half of the devices each, joined by a layer on all (two modalities)."""
    half = made.devices // 2
    if made.devices % 2:
        raise InvalidUsageError(
            f"the shape K has two branches of equal length, but there are {made.devices} devices; "
            "use an even number"
        )
    branches = [range(half), range(half, made.devices)]
    ends = []
    for branch in branches:
        last: list[str] = []
        for d in branch:
            last = [made.add(str(d), "f", [d], last)]
        ends += last
    joined = made.add("join", "f", range(made.devices), ends)
    if not made.inference:
        joined = made.add("join", "b", range(made.devices), [joined])
        for branch in branches:
            last = [joined]
            for d in reversed(branch):
                last = [made.add(str(d), "b", [d], last)]


SHAPES: dict[str, Callable[[_Chains], None]] = {"V": _v, "X": _x, "M": _m, "NN": _nn, "K": _k}


def shape(
    name: str, devices: int = 4, forward: int = 1, backward: int = 3, inference: bool = False
) -> Placement:
    """The placement of that name. forward, backward: spans of a stage's blocks.

    Blocks on all devices have span 1. InvalidUsageError for names and sizes that there are not.
    """
    if name not in SHAPES:
        raise InvalidUsageError(f"there is no shape {name!r}; there are {', '.join(SHAPES)}")
    if not 2 <= devices <= MOST_DEVICES // 4 or min(forward, backward) < 1:
        raise InvalidUsageError(
            f"the shape {name} was asked for {devices} devices and spans {forward} and {backward}; "
            f"devices must be 2 to {MOST_DEVICES // 4} and spans at least 1"
        )
    made = _Chains(devices, forward, backward, inference)
    SHAPES[name](made)
    return Placement(devices, tuple(made.blocks)).checked()
