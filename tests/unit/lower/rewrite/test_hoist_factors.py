"""An expression of small tensors that no op in the iteration writes is computed once, before it is
broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.lower.pipeline import plan as make_plan
from ark.plan.types import Plan
from ark.plan.verify import verify


def planned(build: Callable[[], Any], machine: str = "h100") -> Plan:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        build()
    task_plan = make_plan(model.graph, registry.machine(machine))
    verify([task_plan])
    return task_plan


def expressions(plan: Plan) -> list[tuple[str, str]]:
    """Returns, by op, its kind and the text of its expression."""
    return [(op.kind, str(op.params.get("expr", ""))) for op in plan.ops]


def statistics() -> list[Any]:
    return [ark.tensor((64,), ark.bf16) for _ in range(4)]


def normed() -> None:
    x = ark.tensor((4, 64, 32, 32), ark.bf16)
    y = ark.conv(x, ark.tensor((64, 64, 3, 3), ark.bf16), padding=1)
    ark.relu(ark.batch_norm(y, *statistics()))


@pytest.mark.parametrize("machine", ["h100", "mi300x", "cpu"])
def test_batch_norm_has_one_factor_and_one_term_a_channel(machine: str) -> None:
    ops = expressions(planned(normed, machine))
    assert [kind for kind, text in ops if "rsqrt" in text] == ["elementwise", "elementwise"]
    (after,) = [text for _, text in ops if "relu" in text]
    assert after.count("mul") == after.count("add") == 1


def test_hoisted_factors_are_computed_first_in_fp32() -> None:
    task_plan = planned(normed)
    kinds = [op.kind for op in task_plan.ops]
    small = [i for i, op in enumerate(task_plan.ops) if "rsqrt" in str(op.params)]
    assert max(small) < kinds.index("matmul")
    assert {task_plan.tensors[task_plan.ops[i].operands[-1]].dtype for i in small} == {"fp32"}


def alone(shape: tuple[int, ...], variance: Callable[[], Any] | None = None) -> Callable[[], Any]:
    """Returns a batch norm alone. variance: computed in the iteration, or None if it is an
    input.
    """

    def build() -> Any:
        weight, bias, mean, given = (ark.tensor((shape[1],), ark.fp32) for _ in range(4))
        x = ark.tensor(shape, ark.fp32)
        return ark.batch_norm(x, weight, bias, mean, variance() if variance else given)

    return build


def measured() -> Any:
    rows = ark.tensor((64, 512), ark.fp32)
    return ark.reshape(ark.reduce_mean(ark.mul(rows, rows), 1), [64])


def rooted(plan: Plan) -> list[int]:
    """Returns the result sizes of the ops that take square roots."""
    ops = (op for op in plan.ops if "rsqrt" in str(op.params))
    return [math.prod(plan.tensors[op.operands[-1]].shape) for op in ops]


def test_small_factors_are_not_hoisted() -> None:
    """Factors are not hoisted if results have few elements in all or few for each channel, or if
    the variance is computed in the iteration.
    """
    assert rooted(planned(alone((8, 64, 32, 32)))) == [64, 64]
    assert rooted(planned(alone((8, 64, 16, 16)))) == [8 * 64 * 256]
    assert rooted(planned(alone((32, 1 << 14)))) == [32 << 14]
    assert max(rooted(planned(alone((8, 64, 32, 32), measured)))) == 8 * 64 * 1024


def test_results_equal_numpy() -> None:
    """A batch norm with hoisted factors gives NumPy's result on the CPU, with statistics that
    change between launches.
    """
    rng = np.random.default_rng(0)
    ark.init(backend="cpu")
    x = ark.tensor((4, 16, 64, 64), ark.fp32)
    small = [ark.tensor((16,), ark.fp32) for _ in range(4)]
    y = ark.relu(ark.batch_norm(x, *small, eps=1e-3))
    with ark.Runtime() as runtime:
        runtime.launch()
        for _ in range(2):
            given = rng.normal(size=(4, 16, 64, 64)).astype(np.float32)
            w, b, m, v = (rng.uniform(0.5, 2, 16).astype(np.float32) for _ in range(4))
            for tensor, value in zip((x, *small), (given, w, b, m, v), strict=True):
                tensor.from_numpy(value)
            runtime.run(1)
            w, b, m, v = (t.astype(np.float64).reshape(16, 1, 1) for t in (w, b, m, v))
            want = np.maximum((given - m) / np.sqrt(v + 1e-3) * w + b, 0)
            np.testing.assert_allclose(y.to_numpy(), want, rtol=2e-6, atol=2e-6)
