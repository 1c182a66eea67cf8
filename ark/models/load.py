"""Reads the parameters of a plan from a checkpoint: this rank's part of each, in the memory layout
that the plan requires.

Called by ark.models.generate and the benchmarks. The checkpoint is read one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ark.errors import InvalidUsageError
from ark.ir.dtype import RowType
from ark.models.build import Shape, build
from ark.models.checkpoint import Checkpoint
from ark.plan.packing import from_meta
from ark.plan.program import difference
from ark.plan.types import Plan


def weights(
    checkpoint: Checkpoint,
    shape: Shape,
    plan: Plan,
    adapters: Mapping[str, Callable[[], np.ndarray]] | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name of each parameter of the plan, and this rank's part of its values. adapters:
    functions that read the parameters of LoRA adapters, by name.
    """
    built, packings = build(shape), from_meta(plan.meta)

    def read(name: str) -> np.ndarray:
        if name in built.constants:
            return np.asarray(built.constants[name]())
        if adapters and name in adapters:
            return adapters[name]()
        weight = name.rpartition(".")[0]
        if weight in built.layouts:
            dtype, share = built.lasting[name].dtype, built.shares.get(name, ())
            if isinstance(dtype, RowType) and len(built.lasting[name].shape) == 3:
                inner = share[1:]
                rows = [codes.rows_of(dtype, inner) for codes in checkpoint.experts(weight)]
                return np.stack(rows)
            codes = checkpoint.codes(weight)
            if not isinstance(dtype, RowType):
                return codes.places()
            return codes.rows_of(dtype, share)
        values = checkpoint.read(name, *built.shares.get(name, ()))
        # The array is converted to the parameter's own type, because norms and biases may have a
        # different type than other weights.
        return values.astype(built.lasting[name].dtype.numpy, copy=False)

    for buffer in plan.buffers:
        if buffer.arena == "parameter" and buffer.rank == plan.rank:
            packing = packings.get(buffer.name)
            yield buffer.name, packing.apply(read) if packing else read(buffer.name)


def check_plan(plan: Plan, expected: Plan, shape: Shape) -> None:
    """Raises InvalidUsageError if a loaded plan does not compute exactly this model.

    expected: the plan that ark itself makes for the model.
    """
    differs = difference(plan, expected)
    if differs:
        raise InvalidUsageError(
            f"the plan does not match this checkpoint with a context of {shape.context} and "
            f"chunks of {shape.chunk} tokens: {differs}; plan again with `ark plan DIR "
            "--context N --chunk N`"
        )
