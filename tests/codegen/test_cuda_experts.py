"""Products with the weights of chosen experts in the variant `roles`, whose warps load the weights
of the next outputs ahead. On a GPU they are compared with NumPy.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import ark
from ark.backend.codegen.writer import write
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType, RowType, bf16, fp4, fp32, int4, int8, row_type, uint4
from ark.ir.rows import row_bytes, row_values
from ark.lower.pipeline import plan
from ark.plan import kind as kinds
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.runtime.executor import Executor
from tests.slow import slow

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend
from ark_cuda.tasks.experts import Ahead, Along, OnUnits

needs_gpu = pytest.mark.skipif(
    not backend.probe().devices and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
EXPERT_COUNT = 6
# (columns, rows of an expert, chosen experts). The cases differ in whether all lanes have a piece
# of a row, in the parts of a row, and in whether all warps have outputs.
SIZES = [(2048, 768, 4), (2880, 352, 2), (96, 40, 1), (1032, 1000, 3)]
# With MXFP4 weights. The cases differ in the parts of a row and in the tiles of a task.
MXFP4_SIZES = [(2880, 448, 2), (448, 2880, 2)]
TypeOf = Callable[[int], DataType]
"""The type of experts' weights with that many columns."""


def plain(columns: int) -> DataType:
    return bf16


def mxfp4(columns: int) -> DataType:
    return row_type(fp4, columns, 32, bf16, False, bf16)


def layer(columns: int, inner: int, chosen: int, type_of: TypeOf) -> Model:
    """A layer of experts with its norm, router and residual."""
    model = Model(0, 1)

    def rows(name: str, outputs: int, inputs: int) -> ark.Tensor:
        return ark.parameter((EXPERT_COUNT, outputs, inputs), type_of(inputs), name=name)

    with use_model(model):
        x = ark.tensor([1, columns], name="x")
        normed = ark.rmsnorm(x, ark.parameter([columns], name="norm"), 1e-5)
        router = ark.parameter([EXPERT_COUNT, columns], bf16, name="router")
        scores, experts = ark.topk(ark.softmax(ark.linear(normed, router)), chosen)
        gate = ark.expert_linear(normed, rows("gate", inner, columns), experts)
        up = ark.expert_linear(normed, rows("up", inner, columns), experts)
        down = ark.expert_linear(ark.swiglu(gate, up), rows("down", columns, inner), experts)
        weighted = ark.mul(down, ark.reshape(scores, (1, chosen, 1)))
        ark.add(x, ark.reduce_sum(weighted, axis=1, keepdims=False), name="result")
    return model


def planned(machine: ark.Machine, *sizes: object) -> Plan:
    task_plan = plan(layer(*sizes).graph, machine)  # type: ignore[arg-type]
    assert machine_of(task_plan).variant.name == "roles"
    return task_plan


def bodies(task_plan: Plan) -> list[type | None]:
    """The class of the CUDA body of each op with experts; None for the common body."""
    machine, dialect = machine_of(task_plan), backend.dialect("sm_90a")
    signatures = (kinds.signature(task_plan, o) for o in task_plan.ops if o.kind == "expert_linear")
    served = (dialect.body(sig, machine) for sig in signatures)
    return [None if body is None else type(body) for body in served]


@pytest.mark.parametrize("sizes", SIZES)
def test_experts_of_one_row_load_ahead(sizes: tuple) -> None:
    task_plan = planned(backend.machine("h200"), *sizes, plain)
    assert bodies(task_plan) == [Ahead, OnUnits]
    source = write(task_plan, machine_of(task_plan), backend.dialect("sm_90a")).source.text
    assert source.count("ark_expert_ahead<") == source.count("ark_expert_units<") == 1


@pytest.mark.parametrize(
    ("codes", "group", "zeros", "taken"),
    [
        (fp4, 32, False, Along),
        (int4, 128, False, OnUnits),
        (int8, 256, False, OnUnits),
        (uint4, 32, True, None),
        (int4, 16, False, None),
    ],
    ids=str,
)
def test_quantised_experts_load_ahead_unless_a_piece_has_several_factors(
    codes: DataType, group: int, zeros: bool, taken: type | None
) -> None:
    """Quantised weights of experts are loaded ahead only if the codes in 16 bytes share a scale and
    there are no zero points.
    """
    dtype = row_type(codes, 256, group, fp32 if zeros else bf16, zeros, bf16)
    assert isinstance(dtype, RowType)
    task_plan = planned(backend.machine("h200"), 256, 256, 2, lambda _: dtype)
    assert bodies(task_plan) == [taken] * 2


def weights(
    shape: tuple[int, int, int], type_of: TypeOf, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The experts' weights as an executor writes them, and their values."""
    experts, outputs, columns = shape
    dtype = type_of(columns)
    if not isinstance(dtype, RowType):
        array = (rng.standard_normal(shape) * columns**-0.5).astype(ml_dtypes.bfloat16)
        return array, array.astype(np.float64)
    # Many codes are 0.5: matrix units have to multiply subnormal numbers (experts_along.h).
    codes = rng.choice([-3, -1.5, -1, -0.5, 0, 0.5, 0.5, 1, 2, 6], (experts * outputs, columns))
    scales = np.exp2(rng.integers(-7, -4, (experts * outputs, dtype.groups)))
    data = row_bytes(dtype, codes.astype(np.float32), scales.astype(np.float32))
    values = row_values(dtype, data).reshape(shape)
    return data.reshape(experts, outputs, -1), values.astype(np.float64)


@needs_gpu
@pytest.mark.parametrize(
    ("sizes", "type_of", "taken"),
    [
        (SIZES[0], plain, [Ahead, OnUnits]),
        *(pytest.param(s, plain, [Ahead, OnUnits], marks=slow) for s in SIZES[1:]),
        (MXFP4_SIZES[0], mxfp4, [Along, Along]),
        pytest.param(MXFP4_SIZES[1], mxfp4, [Along, Along], marks=slow),
    ],
)
def test_experts_loaded_ahead_equal_numpy(
    sizes: tuple[int, int, int], type_of: TypeOf, taken: list[type]
) -> None:
    columns, inner, chosen = sizes
    rng = np.random.default_rng(0)
    with contextlib.closing(backend.open(0)) as device:
        task_plan = planned(device.machine, *sizes, type_of)
        assert bodies(task_plan) == taken
        given: dict[str, np.ndarray] = {}
        with Executor(task_plan, backend, device) as executor:
            for name, shape in {
                "x": (1, columns),
                "norm": (columns,),
                "router": (EXPERT_COUNT, columns),
            }.items():
                kind = np.float32 if name in ("x", "norm") else ml_dtypes.bfloat16
                scale = 1.0 if name in ("x", "norm") else shape[-1] ** -0.5
                array = (rng.standard_normal(shape) * scale).astype(kind)
                executor.write(name, array)
                given[name] = array.astype(np.float64)
            for name, (outputs, inputs) in {
                "gate": (inner, columns),
                "up": (inner, columns),
                "down": (columns, inner),
            }.items():
                array, given[name] = weights((EXPERT_COUNT, outputs, inputs), type_of, rng)
                executor.write(name, array)
            executor.start(1).wait(60)
            output = executor.find("result")
            size = columns * (8 if output.packet else 4)
            data = device.read(executor.tensor_address(output), size).view(np.float32)
            result = data.reshape(columns, -1)[:, 0].astype(np.float64)
    x = given["x"][0]
    normed = x / np.sqrt((x * x).mean() + 1e-5) * given["norm"]
    logits = given["router"] @ normed
    scores = np.exp(logits - logits.max())
    scores /= scores.sum()
    want = x.copy()
    for expert in np.argsort(-scores)[:chosen]:
        gate, up = given["gate"][expert] @ normed, given["up"][expert] @ normed
        want += scores[expert] * (given["down"][expert] @ (gate / (1 + np.exp(-gate)) * up))
    np.testing.assert_allclose(result, want, rtol=2e-2, atol=2e-2 * np.abs(want).max())
