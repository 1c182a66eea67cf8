"""The parameters of a plan, made of a checkpoint's tensors: a rank's share, as the plan packs it.

Called by ark.models.generate and the benchmarks; the checkpoint's bytes are read as they are asked
for, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ark.errors import InvalidUsageError
from ark.models.build import LASTING, Built, Shape, build
from ark.models.checkpoint import Checkpoint
from ark.plan.packing import from_meta
from ark.plan.types import Plan

Layout = tuple[tuple[int, ...], str]  # a shape and the name of a type


def weights(checkpoint: Checkpoint, shape: Shape, plan: Plan) -> Iterator[tuple[str, np.ndarray]]:
    """Each parameter of the plan by name, with what this rank holds of the checkpoint."""
    built, packings = build(shape), from_meta(plan.meta)

    def read(name: str) -> np.ndarray:
        if name in built.constants:
            return np.asarray(built.constants[name]())
        return checkpoint.read(name, *built.shares.get(name, ()))

    for buffer in plan.buffers:
        if buffer.arena == "parameter" and buffer.rank == plan.rank:
            packing = packings.get(buffer.name)
            yield buffer.name, packing.apply(read) if packing else read(buffer.name)


def check_plan(plan: Plan, shape: Shape) -> None:
    """InvalidUsageError for a plan from elsewhere whose weights and state are not this model's."""
    expected = _expected(build(shape), plan)
    names = {b.id: b.name for b in plan.buffers if b.arena in LASTING and b.rank == plan.rank}
    found: dict[str, Layout] = {
        t.name: (t.shape, t.dtype) for t in plan.tensors if names.get(t.buffer) == t.name
    }
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise InvalidUsageError(
                f"the plan is not one of this checkpoint with this context: for {name!r} it "
                f"has {_layout(found.get(name))}, the checkpoint needs "
                f"{_layout(expected.get(name))}; make it again with `ark plan DIR --context N`"
            )


def _expected(built: Built, plan: Plan) -> dict[str, Layout]:
    """Layouts of the model's parameters and state, packed as the plan says."""
    found: dict[str, Layout] = {n: (t.shape, t.dtype.name) for n, t in built.lasting.items()}
    for packing in from_meta(plan.meta).values():
        parts = [found.pop(part.name, ((), "")) for part in packing.parts]
        shapes, dtypes = {s[1:] for s, _ in parts}, {d for _, d in parts}
        sizes = [s[0] if len(s) == 2 else 0 for s, _ in parts]
        widths = [part.pairs or 1 for part in packing.parts]
        whole = all(n and n % w == 0 for n, w in zip(sizes, widths, strict=True))
        if (
            len(shapes) > 1
            or len(dtypes) > 1
            or not whole
            or (packing.interleave and len(set(sizes)) > 1)
        ):
            raise InvalidUsageError(
                f"the plan is not one of this checkpoint: it makes {packing.name!r} of "
                f"{[p.name for p in packing.parts]}, which are no such parameters here; make it "
                "again with `ark plan DIR`"
            )
        found[packing.name] = ((sum(sizes), *shapes.pop()), dtypes.pop())
    return found


def _layout(entry: Layout | None) -> str:
    return "nothing" if entry is None else f"{list(entry[0])} {entry[1]}"
