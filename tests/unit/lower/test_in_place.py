"""Operands that a GPU's plan reads in place instead of copying them: a transposed matrix, a
convolution's windows. Small ops are fused, or run where their inputs are.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ark
from ark.backend import registry
from ark.lower.pipeline import plan as make_plan
from ark.plan.types import Plan
from ark.plan.verify import verify


def planned(build: Callable[[], object], machine: str = "h100") -> Plan:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        build()
    task_plan = make_plan(model.graph, registry.machine(machine), {"variant": "block"})
    verify([task_plan])
    return task_plan


def kinds(plan: Plan) -> list[str]:
    return [op.kind for op in plan.ops]


def test_product_reads_a_transposed_matrix_from_the_original() -> None:
    def build() -> None:
        weight = ark.transpose(ark.tensor((24, 16)), [1, 0])
        ark.matmul(ark.tensor((4, 16)), weight, output=ark.tensor((4, 24)))

    (op,) = planned(build).ops
    assert op.kind == "matmul" and op.params["transpose_b"] is True


def test_other_readers_of_a_folded_transpose_get_it() -> None:
    def build() -> None:
        weight = ark.transpose(ark.tensor((24, 16)), [1, 0])
        ark.matmul(ark.tensor((4, 16)), weight, output=ark.tensor((4, 24)))
        ark.exp(weight, output=ark.tensor((16, 24)))

    assert sorted(kinds(planned(build))) == ["elementwise", "matmul", "transpose"]


def test_unread_transpose_is_executed() -> None:
    assert kinds(planned(lambda: ark.transpose(ark.tensor((24, 16)), [1, 0]))) == ["transpose"]


def test_matrix_that_is_written_in_between_is_copied() -> None:
    def build() -> None:
        source = ark.tensor((24, 16))
        weight = ark.transpose(source, [1, 0])
        ark.copy(ark.tensor((24, 16)), output=source)
        ark.matmul(ark.tensor((4, 16)), weight, output=ark.tensor((4, 24)))

    assert "transpose" in kinds(planned(build))


@pytest.mark.parametrize(
    ("machine", "dtype", "expected"),
    [
        ("h100", ark.fp32, ["convolution"]),
        ("mi300x", ark.fp32, ["convolution"]),
        ("h100", ark.bf16, ["remap", "matmul"]),
        ("cpu-2", ark.fp32, ["remap", "matmul"]),
    ],
)
def test_windows_are_laid_out_for_matrix_units_alone(
    machine: str, dtype: ark.DataType, expected: list[str]
) -> None:
    def build() -> None:
        x, weight = ark.tensor((1, 8, 10, 10), dtype), ark.tensor((16, 8, 3, 3), dtype)
        convolved = ark.conv(x, weight, padding=1)
        ark.reshape(convolved, [16, 100])

    assert kinds(planned(build, machine)) == expected


def test_pointwise_convolution_is_a_product() -> None:
    def build() -> None:
        ark.conv(ark.tensor((1, 8, 10, 10)), ark.tensor((16, 8, 1, 1)))

    assert kinds(planned(build)) == ["matmul"]


def test_patches_of_an_image_are_rows_of_a_product() -> None:
    """The patch embedding of a vision transformer becomes a product that reads the patches in the
    image, without a matrix of windows.
    """

    def build() -> None:
        x, weight = ark.tensor((2, 3, 32, 32), ark.bf16), ark.tensor((64, 3, 8, 8), ark.bf16)
        ark.conv(x, weight, stride=8)

    assert kinds(planned(build)) == ["transpose", "matmul", "transpose"]


def test_small_ops_with_two_results_are_one() -> None:
    """The elementwise ops of an LSTM cell, which has two results (state and output), become one op
    on a GPU.
    """

    def build() -> None:
        gates = [ark.tensor((1, 16)) for _ in range(4)]
        forget, enter, fresh, show = (ark.sigmoid(g) for g in gates)
        state = ark.add(ark.mul(forget, ark.tensor((1, 16))), ark.mul(enter, fresh))
        ark.copy(ark.tanh(state), output=ark.tensor((1, 16)))
        ark.copy(ark.mul(show, ark.tanh(state)), output=ark.tensor((1, 16)))

    assert kinds(planned(build)) == ["fusion"]
    assert set(kinds(planned(build, "cpu-2"))) == {"elementwise"}


def test_chain_of_small_ops_stays_on_one_processor() -> None:
    """A chain of layer norms, small products and residuals runs on one processor."""

    def build() -> None:
        x = ark.tensor((12, 32))
        hidden = x
        for _ in range(3):
            normed = ark.layernorm(hidden)
            hidden = ark.add(hidden, ark.matmul(normed, ark.tensor((32, 32))))
        ark.copy(hidden, output=ark.tensor((12, 32)))

    plan = planned(build)
    busy = [tasks for tasks in plan.phases[0].processors if tasks]
    assert len(busy) == 1 and len(busy[0]) == len(plan.ops) > 5


def test_small_ops_that_do_not_depend_on_each_other_share_a_processor() -> None:
    """A cross entropy of few rows has six tasks, two of which depend on no other. All of them are
    on one processor, so no task waits.
    """

    def build(rows: int = 128) -> None:
        logits, at = ark.tensor((rows, 10)), ark.tensor((rows,), ark.int32)
        ark.cross_entropy(logits, at)

    plan = planned(build)
    busy = [tasks for tasks in plan.phases[0].processors if tasks]
    assert len(busy) == 1 and len(busy[0]) == len(plan.ops) > 1
    assert not any(task.waits for task in busy[0])
    large = planned(lambda: build(1 << 16)).phases[0]
    assert len([tasks for tasks in large.processors if tasks]) > 1
