"""Random torch modules (random_modules.py). A module that ark accepts must compute torch's results
on the CPU; another must be refused in one line. The module is also run in float64, which shows how
much of a difference is rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import ark
from ark.errors import InvalidUsageError, UnsupportedError
from ark.interop.torch.compile import refuse_missing
from ark.interop.torch.export import TRACING, decompositions
from ark.interop.torch.graph import drop_checks
from ark.interop.torch.program import Program
from tests.fuzz import WrongResultError
from tests.fuzz.random_modules import random_module


def module(rng: random.Random, keep: Callable[[str], None]) -> bool | str:
    """The target: a random module. Returns "executed" if ark's results are right, False if it was
    refused.
    """
    with torch.no_grad():
        graph_module, maker = random_module(rng)
        inputs = maker.inputs
        descriptions = [
            f"{n}: {t.dtype} {list(t.shape)} {t.stride()}" for n, t in enumerate(inputs)
        ]
        keep("\n".join([graph_module.code, *descriptions]))
        want = graph_module(*inputs)
        ark.init(backend="cpu")
        try:
            kernel, program = _kernel(graph_module, inputs, rng.random() < 0.2)
        except (UnsupportedError, InvalidUsageError) as error:
            text = str(error)
            if "\n" in text or len(text) > 3000 or "cannot follow the module" in text:
                raise WrongResultError(f"refused by: {text}") from error
            return False
        got = kernel(*inputs)
        precise = _in_float64(graph_module, inputs, want)
        for number, each in enumerate(zip(got, want, precise, strict=True)):
            _compare(number, *each, maker.largest)
        program.close()
    return "executed"


def _kernel(
    graph_module: fx.GraphModule, inputs: list[torch.Tensor], exported: bool
) -> tuple[Callable[..., Any], Program]:
    """Returns the module compiled by ark.from_torch, or, if not `exported`, without torch.export,
    whose tracing takes most of the time.
    """
    if exported:
        whole = ark.from_torch(graph_module, tuple(inputs))
        assert whole._program is not None
        return whole, whole._program
    with TRACING:
        table = decompositions()
        traced = make_fx(graph_module, decomposition_table=table, tracing_mode="fake")(*inputs)
    traced.graph.eliminate_dead_code()
    drop_checks(traced)
    refuse_missing(traced)
    program = Program.of(traced, inputs)
    return program, program


def _in_float64(graph_module: fx.GraphModule, inputs: list[torch.Tensor], want: Any) -> Any:
    """Returns the module's results in float64, or `want` if the module contains float32 explicitly
    and cannot run in float64.
    """
    try:
        return graph_module(*(t.double() if t.is_floating_point() else t for t in inputs))
    except RuntimeError:
        return want


def _compare(number: int, got: Any, want: Any, precise: Any, largest: float) -> None:
    """Raises WrongResultError if a result of ark differs from torch's by more than rounding."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise WrongResultError(
            f"result {number} is {got.dtype} {list(got.shape)}, torch's is {want.dtype} "
            f"{list(want.shape)}"
        )
    if not want.is_floating_point():
        if not torch.equal(got, want):
            raise WrongResultError(f"result {number} is {got}, torch's is {want}")
        return
    near, exact, precise = got.double(), want.double(), precise.double()
    finite = exact.isfinite()
    strange = [t.masked_fill(finite, 0.0) for t in (near, exact)]
    if not torch.equal(finite, near.isfinite()) or not torch.allclose(*strange, equal_nan=True):
        raise WrongResultError(f"result {number} is {got}, torch's is {want}")
    usual = finite & precise.isfinite()
    near, exact, precise = (t.masked_fill(~usual, 0.0) for t in (near, exact, precise))
    rounding = (exact - precise).abs().max()
    few = 64 if want.dtype == torch.float32 else 8
    bound = few * torch.finfo(want.dtype).eps * largest + 20 * rounding
    far = (near - exact).abs().max()
    if not far <= bound:
        raise WrongResultError(f"result {number} differs from torch's by {far}, more than {bound}")
