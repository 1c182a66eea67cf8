"""What an op computes from small tensors that nothing in the iteration makes is computed once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.lower.pipeline import plan as make_plan
from ark.lower.rewrite import factors
from ark.plan.types import Plan
from ark.plan.verify import verify

ROWS, COLUMNS = 4096, 128


def planned(build: Callable[[], Any], machine: str = "h100") -> Plan:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        build()
    made = make_plan(model.graph, registry.machine(machine))
    verify([made])
    return made


def expressions(plan: Plan) -> list[tuple[str, str]]:
    """By op: its kind, and the functions of its expression as text."""
    return [(op.kind, str(op.params.get("expr", ""))) for op in plan.ops]


def statistics() -> list[Any]:
    return [ark.tensor((64,), ark.bf16) for _ in range(4)]


def normed() -> None:
    x = ark.tensor((4, 64, 32, 32), ark.bf16)
    y = ark.conv(x, ark.tensor((64, 64, 3, 3), ark.bf16), padding=1)
    ark.relu(ark.batch_norm(y, *statistics()))


@pytest.mark.parametrize("machine", ["h100", "mi300x", "cpu"])
def test_a_batch_norm_has_one_factor_and_one_term_a_channel(machine: str) -> None:
    ops = expressions(planned(normed, machine))
    rooted = [kind for kind, text in ops if "rsqrt" in text]
    assert rooted == ["pointwise", "pointwise"]
    (after,) = [text for _, text in ops if "relu" in text]
    assert after.count("mul") == after.count("add") == 1


def test_they_come_before_the_product_and_stay_in_fp32() -> None:
    made = planned(normed)
    kinds = [op.kind for op in made.ops]
    small = [i for i, op in enumerate(made.ops) if "rsqrt" in str(op.params)]
    assert max(small) < kinds.index("matmul")
    assert {made.tensors[made.ops[i].operands[-1]].dtype for i in small} == {"fp32"}


def scaled(by: Callable[[Any], Any], rows: int = ROWS) -> Callable[[], None]:
    def build() -> None:
        x, s = ark.tensor((rows, COLUMNS), ark.fp32), ark.tensor((COLUMNS,), ark.fp32)
        ark.mul(ark.add(x, 1.0), by(s))

    return build


def test_what_is_not_worth_an_op_stays() -> None:
    """Few elements; a small tensor as it is; one that the iteration makes."""

    def made_here(s: Any) -> Any:
        return ark.exp(ark.reduce_sum(ark.reshape(s, [1, COLUMNS]), 1))

    assert len(planned(scaled(ark.sqrt)).ops) == 2
    assert len(planned(scaled(ark.sqrt, rows=64)).ops) == 2
    few = planned(scaled(lambda s: s, rows=ROWS))
    assert len(few.ops) == 1
    assert [k for k, _ in expressions(planned(scaled(made_here)))].count("pointwise") <= 2


def test_results_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, of trees with repeated parts, casts, numbers, and one read twice."""
    rng = np.random.default_rng(0)
    values = [rng.uniform(0.5, 2, s).astype(np.float32) for s in ((ROWS, 96), (96,), (ROWS, 1))]
    found = []
    for least in (factors.LEAST, 1 << 40):
        monkeypatch.setattr(factors, "LEAST", least)
        ark.init(backend="cpu")
        x, s, r = (ark.tensor(v.shape, ark.fp32) for v in values)
        root = ark.sqrt(ark.add(s, 1e-3))
        y = ark.add(
            ark.mul(ark.sub(x, root), root),
            ark.mul(ark.cast(ark.cast(root, ark.bf16), ark.fp32), 2.0),
        )
        z = ark.mul(y, ark.add(ark.exp(r), s))
        with ark.Runtime() as runtime:
            runtime.launch()
            for tensor, value in zip((x, s, r), values, strict=True):
                tensor.from_numpy(value)
            runtime.run(1)
            found.append(z.to_numpy().copy())
    assert np.array_equal(*found)
