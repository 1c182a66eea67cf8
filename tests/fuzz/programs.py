"""Random programs over the public ops, with mixed types, NaN, infinities, values over the whole
range, and empty or huge sizes. A program that ark accepts must compute what NumPy and torch
compute.

A program is data (inputs and steps), so that a finding can be replayed from its text. The reference
runs several times in float64: with and without rounding to the tensors' types between ops, and with
operands changed by rounding errors. Elements for which these runs give different kinds of results
(because of an overflow, or of a comparison of nearly equal numbers) are not compared. For all other
elements, the tolerance is the spread of these runs' results. Programs with tensors above
MAX_RUN_ELEMENTS elements are planned for a machine model and verified, not run.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

import ark
from ark.backend import registry
from ark.errors import BaseError
from ark.ir.dtype import by_name
from ark.lower.pipeline import plan as make_plan
from ark.plan.verify import verify
from tests.fuzz import WrongResultError
from tests.fuzz.program_ops import FLOATS, INTEGERS, OPS, UndefinedResultError

DTYPES = (*FLOATS, *FLOATS, *INTEGERS, "bool")
MAX_RUN_ELEMENTS = 1 << 16  # limit of elements of a tensor in programs that are run
EPSILON = {"fp32": 2.0**-21, "fp16": 2.0**-9, "bf16": 2.0**-6}
TINY = {"fp32": 1e-36, "fp16": 3e-7, "bf16": 1e-36}
REFERENCE_VARIANTS = 16  # runs of the reference
# The number that replaces undefined elements in each run of the reference. The values differ in
# class (zero, finite, infinite, NaN) and in comparisons, so a result that depends on an undefined
# element differs between the runs. None: keep the result computed in float64. Runs beyond this list
# replace every undefined element by a random number of its own, so that their order changes too.
UNDEFINED = (None, 0.0, np.inf, -np.inf, np.nan, 1e30, -1e30)
KINDS = ("small", "small", "plain", "special", "wide", "ones")
HUGE = ("cpu-2", "h100", "mi300x")


class UnknownResultError(Exception):
    """Raised if a float that no integer represents is cast to an integer type; the results of later
    ops are then undefined.
    """


def program(rng: random.Random, keep: Callable[[str], None]) -> bool | str:
    """The target: runs a random program. Returns the result of `run_program`."""
    text = json.dumps(random_program(rng))
    keep(text)
    return run_program(text)


def random_program(rng: random.Random) -> dict[str, Any]:
    """Returns a random program as data. inputs: (shape, type, kind of values, seed). steps: (op,
    indices of the values taken, parameters); a value is an input or the result of a step. machine:
    the machine model of programs that are only planned, otherwise empty.
    """
    huge = rng.random() < 0.1
    shape = _shape(rng, huge)
    inputs = [[shape, rng.choice(DTYPES), rng.choice(KINDS), rng.randrange(1 << 30)]]
    for _ in range(rng.randrange(3)):
        thin = [n if rng.random() < 0.7 else 1 for n in shape]
        inputs.append([thin, rng.choice(DTYPES), rng.choice(KINDS), rng.randrange(1 << 30)])
    steps: list[Any] = []
    values = [(tuple(i[0]), i[1]) for i in inputs]
    wanted = rng.randint(1, 3 if huge else 12)
    for tried in range(100):
        if len(steps) == wanted or (steps and tried >= 12):
            break
        name = rng.choice(sorted(OPS))
        drawn = OPS[name].draw(rng, values)
        if drawn is not None:
            taken, parameters, results = drawn
            if all(math.prod(r[0]) <= (1 << 40 if huge else MAX_RUN_ELEMENTS) for r in results):
                steps.append([name, taken, parameters])
                values += results
    return {"inputs": inputs, "steps": steps, "machine": rng.choice(HUGE) if huge else ""}


def _shape(rng: random.Random, huge: bool) -> list[int]:
    if huge:
        sizes = (1, 2, 3, 1 << 12, (1 << 20) + 3, 1 << 24, (1 << 31) - 1)
        shape = [rng.choice(sizes) for _ in range(rng.randint(1, 3))]
        return shape if math.prod(shape) < 1 << 36 else [1 << 24, 3]
    sizes = (1, 1, 2, 3, 4, 5, 7, 8, 16, 33, 64, 100)
    shape = [rng.choice(sizes) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.02:
        shape[rng.randrange(len(shape))] = 0
    return shape if math.prod(shape) <= 8192 else shape[:2]


def run_program(text: str) -> bool | str:
    """Returns False if ark refuses the program, "executed" if it ran with the right results, True
    if it was planned only. Raises WrongResultError for a wrong result.
    """
    given = json.loads(text)
    ark.init(backend="cpu")
    try:
        inputs = [ark.tensor(list(s), by_name(d)) for s, d, _, _ in given["inputs"]]
        tensors: list[Any] = list(inputs)
        for name, taken, parameters in given["steps"]:
            tensors += OPS[name].build([tensors[i] for i in taken], parameters)
        if given["machine"]:
            graph = ark.Model.get_model().graph
            if all(node.virtual for node in graph.nodes):
                return False  # a program of views alone has nothing to run
            verify([make_plan(graph, registry.machine(given["machine"]))])
            return True
    except BaseError as error:
        _check_refusal(str(error), given)
        return False
    return _executed(given, inputs, tensors)


def _check_refusal(text: str, given: dict[str, Any]) -> None:
    """Raises WrongResultError unless ark had a valid reason to refuse a program: a tensor has no
    elements, or the error message reports too little memory of a machine model.
    """
    empty = any(0 in shape for shape, *_ in given["inputs"])
    memory = given["machine"] and any(w in text for w in ("memory", "GiB", "all of them from 1"))
    if not empty and not memory:
        raise WrongResultError(f"refused: {text}")


def _executed(given: dict[str, Any], inputs: list[Any], tensors: list[Any]) -> str:
    """Runs the program and compares its last value and two others with the reference."""
    chooser = random.Random(len(tensors))
    last = len(tensors) - 1
    ends = sorted({last, chooser.randrange(len(tensors)), chooser.randrange(len(tensors))})
    results = {end: tensors[end] for end in ends if end >= len(inputs)}
    names = [(tuple(t.shape()), t.dtype().name) for t in tensors]
    del tensors
    arrays = [values(*i) for i in given["inputs"]]
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, array in zip(inputs, arrays, strict=True):
            tensor.from_numpy(array)
        runtime.run()
        got = {end: tensor.to_numpy() for end, tensor in results.items()}
    try:
        wanted = [reference(given, arrays, names, variant) for variant in range(REFERENCE_VARIANTS)]
    except UnknownResultError:
        return "executed"
    for end, array in got.items():
        shape, dtype = names[end]
        compare(array, [w[end].reshape(shape) for w in wanted], dtype, f"value {end}")
    return "executed"


def values(shape: list[int], dtype: str, kind: str, seed: int) -> np.ndarray:
    """Returns an input's elements."""
    rng, numpy = np.random.default_rng(seed), by_name(dtype).numpy
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in INTEGERS:
        info = np.iinfo(numpy)
        low, high = max(info.min, -9), 10
        if kind == "wide":
            low, high = info.min, info.max
        drawn = rng.integers(low, high, shape, dtype=np.int64).astype(numpy)
        ends = rng.choice(np.array([info.min, info.max, 0, 1], numpy), shape)
        return np.where(rng.random(shape) < 0.2, ends, drawn) if kind == "special" else drawn
    drawn = rng.integers(-4, 5, shape).astype(np.float64)
    if kind in ("plain", "special"):
        drawn = rng.uniform(-3, 3, shape)
    if kind == "wide":
        drawn = np.exp(rng.uniform(-90, 88, shape)) * rng.choice([-1.0, 1.0], shape)
    if kind == "special":
        ends = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 3.3e38, -3.3e38, 1e-40, 6e4, 89.0]
        drawn = np.where(rng.random(shape) < 0.3, rng.choice(ends, shape), drawn)
    if kind == "ones":
        drawn = np.ones(shape)
    with np.errstate(all="ignore"):
        return drawn.astype(np.float32).astype(numpy)


def wide(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns elements of a type as float64, int64 or bool."""
    if dtype == "bool":
        return array.astype(bool)
    return array.astype(np.int64 if dtype in INTEGERS else np.float64)


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the values rounded to the type of a tensor."""
    if dtype in FLOATS:
        return array.astype(np.float32).astype(by_name(dtype).numpy).astype(np.float64)
    return wide(np.asarray(array).astype(by_name(dtype).numpy), dtype)


def reference(
    given: dict[str, Any], arrays: list[np.ndarray], names: list[Any], variant: int
) -> list[np.ndarray]:
    """Computes the program with NumPy. Returns its inputs and the results of all steps, as float64,
    int64 or bool. variant: the number of this run of the reference. Run 0 rounds each value to its
    type, run 1 rounds floats to fp32 only, later runs also perturb operands and results by rounding
    errors. Each run replaces undefined elements by another value.
    """
    noise = np.random.default_rng(variant)
    values = [wide(a, d) for a, (_, d, _, _) in zip(arrays, given["inputs"], strict=True)]
    with np.errstate(all="ignore"):
        for name, taken, parameters in given["steps"]:
            op = OPS[name]
            operands = [values[i] for i in taken]
            if op.smooth and variant > 1:
                operands = [
                    _moved(a, names[i][1], noise) for a, i in zip(operands, taken, strict=True)
                ]
            try:
                results = op.reference(operands, parameters, [names[i][1] for i in taken])
            except UndefinedResultError:
                results = [np.ma.masked_all(names[len(values)][0])]
            floats = results[0].dtype.kind == "f"
            if op.smooth and floats and variant > 1:
                # An error of the operand can be far below the result's own rounding (acos near 0).
                results[0] = _moved(results[0], names[len(values)][1], noise)
            if op.terms is not None and floats and variant > 1:
                moved = EPSILON["fp32"] * noise.choice([-1.0, 1.0], results[0].shape)
                first = np.asarray(parameters.get("left", operands[0]), np.float64)
                results = [results[0] + moved * op.terms(first)]
            for array in results:
                dtype = names[len(values)][1]
                if isinstance(array, np.ma.MaskedArray):
                    numbers = dtype in FLOATS and array.dtype.kind != "b"
                    if dtype in INTEGERS and array.mask.any():
                        raise UnknownResultError
                    array = _filled(array, variant, noise) if numbers else array.filled(variant)
                odd = dtype in FLOATS and variant % 2
                kept = rounded(array, "fp32" if odd else dtype)
                values.append(_other_zeros(kept, variant, noise) if odd else kept)
    return values


def _filled(array: np.ma.MaskedArray, variant: int, noise: np.random.Generator) -> np.ndarray:
    """Returns the array with other values in place of its masked (undefined) elements. The values
    depend on `variant`, so that they differ between the runs of the reference (see UNDEFINED).
    """
    if variant >= len(UNDEFINED):
        drawn = noise.standard_normal(array.shape)
        return np.where(np.ma.getmaskarray(array), drawn, array.data)
    fill = UNDEFINED[variant]
    return array.data if fill is None else array.filled(fill)


def _other_zeros(array: np.ndarray, variant: int, noise: np.random.Generator) -> np.ndarray:
    """Returns the array with the signs of its zeros changed: all positive, all negative, or random.
    An op may return a zero of either sign (docs/ops.md).
    """
    if variant in (3, 5):
        zeros = 0.0 if variant == 3 else -0.0
    else:
        zeros = np.where(noise.random(array.shape) < 0.5, 0.0, -0.0)
    return np.where(array == 0, zeros, array)


def _moved(array: np.ndarray, dtype: str, noise: np.random.Generator) -> np.ndarray:
    """Returns floats perturbed by up to one rounding error of fp32."""
    if dtype not in FLOATS:
        return array
    return array * (1.0 + EPSILON["fp32"] * noise.choice([-1.0, 1.0], array.shape))


def compare(got: np.ndarray, wanted: list[np.ndarray], dtype: str, label: str) -> None:
    """Compares a result of ark with the results of all runs of the reference. Raises
    WrongResultError if an element differs from run 0 by more than the other runs do.
    """
    first, *others = wanted
    if got.shape != first.shape:
        raise WrongResultError(f"{label} has shape {got.shape}, not {first.shape}")
    if dtype not in FLOATS:
        agreed = np.all([o == first for o in others], axis=0)
        wrong = agreed & (wide(got, dtype) != first)
    else:
        near = wide(got, dtype)
        with np.errstate(all="ignore"):
            classes = [np.where(np.isfinite(v), 0.0, v) for v in (near, first, *others)]
            same = [(c == classes[1]) | (np.isnan(c) & np.isnan(classes[1])) for c in classes]
            agreed = np.all(same[2:], axis=0)
            spread = np.max([np.abs(o - first) for o in others], axis=0)
            bound = 6 * spread + EPSILON[dtype] * np.abs(first) + TINY[dtype]
            far = np.isfinite(first) & np.isfinite(near) & ~(np.abs(near - first) <= bound)
            limit = float(np.finfo(np.float16).max if dtype == "fp16" else 3.38e38)
            edge = np.abs(first) * (1 + EPSILON[dtype]) >= limit
            wrong = agreed & (~same[0] | far) & ~edge
    if wrong.any():
        at = tuple(int(i[0]) for i in np.nonzero(wrong))
        raise WrongResultError(
            f"{label} ({dtype} {list(got.shape)}) differs at {int(wrong.sum())} of {wrong.size}, "
            f"first at {list(at)}: {got[at]!r}, expected {first[at]!r} "
            f"(variants {[o[at] for o in others]})"
        )
