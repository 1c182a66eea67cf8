"""Tests the function that times many iterations of the kernels of a compiled model, on the tensors
of an earlier call.
"""

from __future__ import annotations

import gc

import pytest

import ark

torch = pytest.importorskip("torch")

from ark.interop.torch import backend  # noqa: E402
from ark.interop.torch.last_calls import kept_tensors  # noqa: E402
from ark.interop.torch.program import PROGRAMS  # noqa: E402

TENSOR_ELEMENTS = 1000  # few enough that the allocator uses the memory again


class Parted(torch.nn.Module):
    """Two kernels with an operator of torch in between."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.bessel_j0(x * 2.0) + 3.0


def test_iterations_write_no_memory_of_others() -> None:
    ark.init(backend="cpu")
    x = torch.rand(TENSOR_ELEMENTS)
    before = set(PROGRAMS)
    compiled = torch.compile(Parted(), backend=backend)
    want = Parted()(x)
    torch.testing.assert_close(compiled(x), want)
    programs = set(PROGRAMS) - before
    assert len(programs) == 2
    for program in programs:  # its tensors may be freed
        with pytest.raises(ark.InvalidUsageError, match="kept_tensors"):
            program.iteration_seconds(2)
    with kept_tensors():
        compiled(x)
        gc.collect()
        others = [torch.full((TENSOR_ELEMENTS,), 7.0) for _ in range(100)]
        for program in programs:
            assert program.iteration_seconds(20) > 0
    assert all((t == 7.0).all() for t in others)
    torch.testing.assert_close(compiled(x), want)
