"""Builds cases of `ark bench ops` for the sweep over many shapes of common torch ops. A case is a
torch function; ark's torch front end converts it to ark's ops. Called by ark.cli.measure.cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ark.cli.measure.case import OpCase
from ark.cli.measure.peer import import_torch
from ark.ir.dtype import DataType, bf16, fp32, int64

SWEEP = "sweep-"  # prefix of the cases' names
Shape = tuple[int, ...]
Function = Callable[..., Any]  # (torch, tensors...) -> tensor


def case(
    name: str,
    function: Function,
    *shapes: Shape,
    dtype: DataType = fp32,
    indices: Mapping[int, int] | None = None,
) -> OpCase:
    """A case that is derived from a function of torch. Its memory traffic is the bytes of its
    inputs. indices: which inputs (by number) are int64 indices, with their upper bound (exclusive).
    """
    bounds = dict(indices or {})
    widths = [(int64 if i in bounds else dtype).itemsize for i in range(len(shapes))]
    nbytes = sum(math.prod(s) * w for s, w in zip(shapes, widths, strict=True))
    first = "x".join(str(n) for n in shapes[0])

    def build(*inputs: Any) -> Any:
        return _lowered(function, inputs)

    def peer(*inputs: Any) -> Any:
        return function(import_torch(), *inputs)

    return OpCase(
        *(f"{SWEEP}{name}-{first}-{dtype.name}", dtype, tuple(shapes), build, peer),
        *(0.0, float(nbytes)),
        on_cpu=False,
        indices=bounds,
        index_type=int64,
    )


def in_both_types(name: str, function: Function, *shapes: Shape) -> list[OpCase]:
    """Two cases of the same function and shapes, one in fp32 and one in bf16."""
    return [case(name, function, *shapes, dtype=d) for d in (fp32, bf16)]


def _lowered(function: Function, inputs: tuple[Any, ...]) -> Any:
    """Calls a torch function on tensors of ark's graph through the torch front end, and returns the
    result's tensor in that graph.
    """
    torch = import_torch()
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ark.interop.torch.export import export
    from ark.interop.torch.graph import apply, drop_checks
    from ark.interop.torch.values import Value, own

    class Whole(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, *given: Any) -> Any:
            return function(torch, *given)

    given = [Value(t.ir.shape, t.ir.dtype.to_torch(), t) for t in inputs]
    with FakeTensorMode():
        examples = tuple(torch.empty(v.shape, dtype=v.dtype) for v in given)
    graph = export(Whole(), examples, False).graph_module
    drop_checks(graph)
    return own(apply(graph, given)[0], set()).tensor
