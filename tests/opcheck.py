"""Runs many small op calls in one launch and compares each with NumPy. They share a launch because
compilation takes most of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ark
from ark.ir.dtype import DataType
from ark.lower import registry

TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2, "fp4": 0.0}
WHOLE = ("int64", "int32", "uint32", "int8", "uint8", "byte", "int4", "uint4")


@dataclass
class Case:
    """One op call to check. build: maps the input tensors to the result, by ark. expected: maps
    float64 (or integer) arrays to the result, by NumPy.
    """

    name: str
    inputs: Sequence[tuple[np.ndarray, DataType]]
    build: Callable[..., Any]
    expected: Callable[..., np.ndarray]
    tolerance: float | None = None
    tensors: list[ark.Tensor] = field(default_factory=list)
    result: Any = None


def rounded(array: np.ndarray, dtype: DataType) -> np.ndarray:
    """The values of an array after rounding to the type, as float64, int64 or bool."""
    if dtype.name == "bool":
        return array.astype(np.bool_)
    wide = np.int64 if dtype.name in WHOLE else np.float64
    return array.astype(dtype.numpy).astype(wide)


def wrapped(array: np.ndarray, dtype: DataType) -> np.ndarray:
    """Converts whole numbers to elements of an integer type or bool."""
    if dtype.name == "bool":
        return array.astype(np.bool_)
    return array.astype(np.int64).astype(dtype.numpy)


def check(cases: Sequence[Case], loop_mode: bool = False, iterations: int = 1) -> None:
    """Builds all cases in one model, runs it and compares. A failed assertion names the case."""
    for case in cases:
        case.tensors = [ark.tensor(list(a.shape), dtype) for a, dtype in case.inputs]
        case.result = case.build(*case.tensors)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=loop_mode)
        for case in cases:
            for tensor, (array, dtype) in zip(case.tensors, case.inputs, strict=True):
                tensor.from_numpy(array.astype(dtype.numpy))
        runtime.run(iterations)
        for case in cases:
            got = case.result.to_numpy()
            want = case.expected(*(rounded(a, d) for a, d in case.inputs))
            compare(case.name, got, want, case.result.dtype(), case.tolerance)
            _check_registered(case, want)


def _check_registered(case: Case, want: np.ndarray) -> None:
    """Compares with the op's registered reference, if the case is a single op on its inputs."""
    inputs = [t.ir.id for t in case.tensors]
    for node in case.result.model.graph.nodes:
        alone = [t.id for t in node.inputs] == inputs
        outputs = [t.id for t in node.outputs]
        if not alone or case.result.ir.id not in outputs:
            continue
        define = registry.get(node.type).reference
        assert define is not None, f"{node.type} has no reference"
        result = define([rounded(a, d) for a, d in case.inputs], node.attrs)
        got = result[outputs.index(case.result.ir.id)]
        dtype = case.result.dtype()
        if dtype.name in (*WHOLE, "bool"):
            if dtype.name == "bool":
                got = got != 0
            got = got if got.dtype.kind in "iub" else np.trunc(got)
            got, want = wrapped(got, dtype), wrapped(want, dtype)
        if dtype.name == "fp4":
            got = rounded(got, dtype)
        np.testing.assert_allclose(
            np.reshape(got, want.shape).astype(np.float64),
            want.astype(np.float64),
            rtol=1e-9,
            atol=1e-9,
            err_msg=case.name,
        )


def compare(
    name: str, got: np.ndarray, want: np.ndarray, dtype: DataType, tolerance: float | None = None
) -> None:
    """Asserts shape, and values within the type's tolerance."""
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == np.dtype(dtype.numpy), f"{name}: {got.dtype} of a tensor of {dtype}"
    if dtype.name in (*WHOLE, "bool"):
        np.testing.assert_array_equal(got, wrapped(want, dtype), err_msg=name)
        return
    limit = TOLERANCE[dtype.name] if tolerance is None else tolerance
    np.testing.assert_allclose(
        got.astype(np.float64), want.astype(np.float64), rtol=limit, atol=limit, err_msg=name
    )
