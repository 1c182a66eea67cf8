"""Computations with known results. They check a compiler when it is first used on a device.

One of the models has so many device functions that they are compiled as several programs. The other
models have matmuls and attention that are large enough for matrix units. Expected results are
computed with NumPy in float64, from the definitions of the ops. Called by ark.runtime.toolchain
through `examiners`, and by `ark doctor`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ark.backend.devices import KernelDevice
from ark.backend.protocol import KernelBackend
from ark.frontend.model import Model, use_model
from ark.frontend.tensor import Tensor
from ark.ir.dtype import DataType, bf16, fp16, fp32
from ark.lower import registry
from ark.lower.pipeline import plan
from ark.ops import attention, matmul, tensor
from ark.plan.types import Plan
from ark.runtime import program, toolchain
from ark.runtime.executor import Executor

# Tolerance relative to the largest element; it allows for rounding and, in fp32, for products that
# hardware computes from 16-bit parts of the operands.
TOLERANCE = {"fp32": 1e-3, "fp16": 6e-3, "bf16": 4e-2}


class Known:
    """A computation with a known result: its inputs by name, and the tensors whose results are
    compared. All names are different.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, np.ndarray] = {}
        self.results: dict[str, DataType] = {}
        self.rng = np.random.default_rng(7)

    def input(self, shape: tuple[int, ...], dtype: DataType) -> Tensor:
        name = f"input{len(self.inputs)}"
        self.inputs[name] = self.rng.standard_normal(shape).astype(dtype.numpy)
        return tensor(shape, dtype, name=name)

    def result(self, label: str, shape: tuple[int, ...], dtype: DataType) -> Tensor:
        name = f"{label} of {dtype} {list(shape)}"
        self.results[name] = dtype
        return tensor(shape, dtype, name=name)

    def product(self, m: int, n: int, k: int, dtype: DataType) -> None:
        a, b = self.input((m, k), dtype), self.input((n, k), dtype)
        matmul(a, b, self.result("product", (m, n), dtype), transpose_other=True)

    def attention(self, rows: int, heads: int, kv_heads: int, width: int, dtype: DataType) -> None:
        query = self.input((rows, heads * width), dtype)
        key, value = (self.input((kv_heads, rows, width), dtype) for _ in range(2))
        out = self.result(f"attention with {kv_heads} kv heads", (rows, heads * width), dtype)
        attention(query, key, value, output=out)


def many(known: Known) -> None:
    """Adds many small ops, each of which needs its own device function, so that the compiler links
    several programs.
    """
    for dtype in (fp32, fp16, bf16):
        for m, n, k in ((40, 24, 48), (16, 128, 64), (72, 56, 96), (33, 65, 40)):
            known.product(m, n, k, dtype)
        known.attention(40, 4, 1, 24, dtype)
        known.attention(40, 4, 2, 64, dtype)


def large_product(known: Known) -> None:
    """Adds a matmul whose size is a multiple of the tile, so that matrix units compute it."""
    known.product(256, 256, 512, bf16)


def large_attention(known: Known) -> None:
    """Adds an attention op whose size is a multiple of the tile, so that matrix units
    compute it.
    """
    known.attention(200, 4, 2, 64, fp16)


MODELS: tuple[Callable[[Known], None], ...] = (many, large_product, large_attention)


def examine(backend: KernelBackend, device: KernelDevice) -> str:
    """Runs the known computations on the device; the kernels are compiled concurrently. Returns the
    differences from the expected results, with numbers, or an empty text.
    """
    cases = []
    for build in MODELS:
        known = Known()
        with use_model(Model()) as model:
            build(known)
        planned = plan(model.graph, device.machine)
        program.begin(planned, backend, device.arch)
        cases.append((known, model, planned))
    reasons = (_compared(*case, backend, device) for case in cases)
    return next(filter(None, reasons), "")


def _compared(
    known: Known, model: Model, planned: Plan, backend: KernelBackend, device: KernelDevice
) -> str:
    with Executor(planned, backend, device) as executor:
        for name, values in known.inputs.items():
            executor.write(name, values)
        executor.start(1).wait()
        got = {name: executor.read(name).astype(np.float64) for name in known.results}
    exact = {name: array.astype(np.float64) for name, array in known.inputs.items()}
    for node in model.graph.nodes:
        define = registry.get(node.type).reference
        name = node.outputs[0].name
        if define is None or name not in known.results:
            continue
        want = define([exact[t.name] for t in node.inputs], node.attrs)[0].reshape(got[name].shape)
        error = np.abs(got[name] - want).max() / np.abs(want).max()
        if not error <= TOLERANCE[known.results[name].name]:
            return f"the {name} is wrong by {error:.3g} of its largest element"
    return ""


toolchain.examiners["known results"] = examine
