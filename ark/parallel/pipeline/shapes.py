"""Named placements of the Tessel paper: V, X, M, NN and K.

Lin et al., "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule
Search" (HPCA 2024). The forward block of a stage allocates one unit of memory on its device, and
the backward block frees it. Without backward blocks (inference) no memory is held. Called by `ark
tessel` and users.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ark.errors import InvalidUsageError
from ark.parallel.pipeline.placement import MOST_DEVICES, Block, Placement


class _Chains:
    """Collects blocks that form chains: each block depends on its predecessor in the chain."""

    def __init__(self, devices: int, forward: int, backward: int, inference: bool) -> None:
        self.devices, self.inference = devices, inference
        self.spans = {"f": forward, "b": backward}
        self.blocks: list[Block] = []

    def add(self, name: str, way: str, devices: Sequence[int], after: Sequence[str]) -> str:
        """Adds a block for a stage on one device, or for a layer that all devices share and that
        takes one unit of time.
        """
        label = f"{way}{name}"
        whole = len(devices) > 1
        held = 0 if self.inference or name in ("in", "mid") else 1
        memory = held if way == "f" else -held
        span = 1 if whole else self.spans[way]
        self.blocks.append(Block(label, span, memory, tuple(devices), tuple(after)))
        return label

    def chain(self, stages: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Adds forward blocks through the stages, then backward blocks in reverse order."""
        last: list[str] = []
        for way, ordered in (("f", list(stages)), ("b", list(stages)[::-1])):
            if way == "f" or not self.inference:
                for name, devices in ordered:
                    last = [self.add(name, way, devices, last)]


def _v(chains: _Chains) -> None:
    """One stage after the other, forward and back (the placement of 1F1B)."""
    chains.chain([(str(d), [d]) for d in range(chains.devices)])


def _x(chains: _Chains) -> None:
    """Two pipelines, which start from opposite ends (the placement of Chimera)."""
    stages = [(str(d), [d]) for d in range(chains.devices)]
    chains.chain([(f"{name}.down", devices) for name, devices in stages])
    chains.chain([(f"{name}.up", devices) for name, devices in stages[::-1]])


def _m(chains: _Chains) -> None:
    """A layer on all devices, such as a large embedding, followed by a pipeline of stages."""
    stages = [(str(d), [d]) for d in range(chains.devices)]
    chains.chain([("in", range(chains.devices)), *stages])


def _nn(chains: _Chains) -> None:
    """A layer on all devices before the first stage and again in the middle (encoder and
    decoder).
    """
    stages = [(str(d), [d]) for d in range(chains.devices)]
    half, every = chains.devices // 2, range(chains.devices)
    chains.chain([("in", every), *stages[:half], ("mid", every), *stages[half:]])


def _k(chains: _Chains) -> None:
    """Two branches, each on half of the devices, followed by a layer on all devices that joins them
    (two modalities).
    """
    half = chains.devices // 2
    if chains.devices % 2:
        raise InvalidUsageError(
            f"the shape K has two branches of equal length, but devices={chains.devices} is "
            "odd; use an even number"
        )
    branches = [range(half), range(half, chains.devices)]
    ends = []
    for branch in branches:
        last: list[str] = []
        for d in branch:
            last = [chains.add(str(d), "f", [d], last)]
        ends += last
    joined = chains.add("join", "f", range(chains.devices), ends)
    if not chains.inference:
        joined = chains.add("join", "b", range(chains.devices), [joined])
        for branch in branches:
            last = [joined]
            for d in reversed(branch):
                last = [chains.add(str(d), "b", [d], last)]


SHAPES: dict[str, Callable[[_Chains], None]] = {"V": _v, "X": _x, "M": _m, "NN": _nn, "K": _k}


def shape(
    name: str, devices: int = 4, forward: int = 1, backward: int = 3, inference: bool = False
) -> Placement:
    """The placement of that name. forward, backward: the times of a stage's blocks.

    Blocks on all devices take 1 unit of time. Raises InvalidUsageError for unknown names and
    unsupported sizes.

    Examples:
        >>> [block.name for block in ark.parallel.shape("V", devices=2).blocks]
        ['f0', 'f1', 'b1', 'b0']
    """
    if name not in SHAPES:
        raise InvalidUsageError(
            f"the shape {name!r} does not exist; use one of {', '.join(SHAPES)}"
        )
    if not 2 <= devices <= MOST_DEVICES // 4 or min(forward, backward) < 1:
        raise InvalidUsageError(
            f"the pipeline placement {name} does not support devices={devices}, "
            f"forward={forward}, backward={backward}; devices must be 2 to {MOST_DEVICES // 4}, "
            "and forward and backward, in units of time, at least 1"
        )
    chains = _Chains(devices, forward, backward, inference)
    SHAPES[name](chains)
    return Placement(devices, tuple(chains.blocks)).checked()
