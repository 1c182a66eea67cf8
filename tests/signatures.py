"""Small plans that together use every task kind in every data type: the codegen tests of each
backend emit and compile them, so a kind that a dialect cannot spell is found without its hardware.
"""

from __future__ import annotations

from collections.abc import Callable

from ark import tasks
from ark.ir.dtype import FLOATS, DataType, bf16, fp16, fp32, int32
from ark.ir.model import Graph
from ark.model import Model, use_model
from ark.models.config import LlamaConfig
from ark.models.generate import plans as llama_plans
from ark.models.llama import Shape
from ark.ops import elementwise as ew
from ark.ops.linear_algebra import matmul
from ark.plan.machine import Machine
from ark.plan.planner import plan
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.tensor import Tensor

__all__ = ["plans", "tasks"]

UNARY = (ew.exp, ew.sqrt, ew.rsqrt, ew.relu, ew.gelu, ew.sigmoid, ew.silu)
BINARY = (ew.add, ew.sub, ew.mul, ew.div)


def _input(graph: Graph, model: Model, shape: tuple[int, ...], dtype: DataType) -> Tensor:
    return Tensor(graph.tensor(shape, dtype, arena="state", name=f"in{len(graph.tensors)}"), model)


def _elementwise(model: Model, dtype: DataType) -> None:
    graph = model.graph
    a = _input(graph, model, (3, 40), dtype)
    row = _input(graph, model, (1, 40), dtype)
    column = _input(graph, model, (2, 3, 1), dtype)
    for function in UNARY if dtype in FLOATS else ():
        function(a)
    for function in BINARY:
        function(a, row)
        function(a, column)
        function(a, 2)
    ew.copy(a)
    ew.constant(3, (5, 7), dtype)
    for other in (fp32, fp16, bf16, int32):
        ew.cast(a, other)


def _matmuls(model: Model, dtype: DataType) -> None:
    graph = model.graph
    for ta in (False, True):
        for tb in (False, True):
            a = _input(graph, model, (20, 33) if ta else (33, 20), dtype)
            b = _input(graph, model, (70, 20) if tb else (20, 70), dtype)
            matmul(a, b, transpose_input=ta, transpose_other=tb)
    a = _input(graph, model, (2, 1, 64, 64), dtype)
    matmul(a, _input(graph, model, (1, 3, 64, 128), dtype))
    matmul(a, _input(graph, model, (1, 3, 128, 64), dtype), transpose_other=True)


_CASES: tuple[tuple[str, Callable[[Model, DataType], None], tuple[DataType, ...]], ...] = (
    ("elementwise", _elementwise, (fp32, fp16, bf16, int32)),
    ("matmul", _matmuls, FLOATS),
)


def _llama(machine: Machine) -> list[tuple[str, Plan]]:
    found = []
    for dtype in FLOATS:
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=600,
            max_position_embeddings=256,
        )
        shape = Shape(config, dtype, 192, 16)
        for fused in (True, False):
            name = f"llama-{dtype.name}-{'fused' if fused else 'unfused'}"
            found.append((name, llama_plans(shape, machine, {"fuse": fused})[0]))
        pair = Shape(config, dtype, 192, 16, 0, 2)
        found += [(f"llama-{dtype.name}-rank{p.rank}", p) for p in llama_plans(pair, machine)]
    return found


def plans(machine: Machine) -> list[tuple[str, Plan]]:
    """Verified plans for `machine`, each with a name; the same ones in the same order each time."""
    found = []
    for case, build, dtypes in _CASES:
        for dtype in dtypes:
            model = Model()
            with use_model(model):
                build(model, dtype)
            made = plan(model.graph, machine)
            verify([made])
            found.append((f"{case}-{dtype.name}", made))
    return found + _llama(machine)
