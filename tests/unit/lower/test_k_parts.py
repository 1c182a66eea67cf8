"""Products whose sum over k is split into parts, on machines where every variant uses matrix units.
The chosen cut is among the fastest by the timing model of docs/rocm-timing.md, and k is not split
for products whose epilogue does not permit it.
"""

from __future__ import annotations

import dataclasses

import pytest

from ark.backend import registry
from ark.ir.dtype import bf16, fp32
from ark.ir.graph import Graph
from ark.ir.hints import Hints
from ark.lower import k_parts
from ark.lower.pipeline import plan
from ark.machine.capability import Capability
from ark.models.build import Shape
from ark.models.config import builtin_config
from ark.models.plans import plans
from ark.plan.types import Plan, PlanOp
from ark.plan.verify import verify

PAIR = ("bf16", "bf16")
# The predicted microseconds of a launch on an MI300X, by the product's (rows, columns, k) and
# its cut (rows and columns of a tile, parts of k).
PREDICTED = {
    (128, 2048, 2048): {
        (128, 32, 1): 40.2,
        (128, 128, 1): 30.1,
        (128, 128, 4): 18.6,
        (128, 128, 8): 17.8,
        (128, 128, 16): 20.2,
        (128, 32, 4): 21.0,
        (128, 64, 8): 19.6,
        (128, 256, 16): 22.1,
    },
    (512, 2048, 2048): {
        (128, 32, 1): 42.7,
        (128, 128, 1): 30.6,
        (128, 128, 4): 23.1,
        (128, 128, 8): 34.1,
        (256, 128, 4): 27.9,
        (256, 128, 8): 29.1,
        (256, 256, 16): 41.6,
    },
    (512, 2048, 8192): {
        (128, 128, 1): 90.8,
        (128, 128, 4): 39.2,
        (256, 128, 4): 53.3,
        (256, 128, 8): 41.4,
        (256, 256, 16): 58.3,
    },
    (128, 2048, 8192): {
        (128, 32, 1): 136.8,
        (128, 128, 8): 25.3,
        (128, 128, 12): 26.2,
        (128, 128, 16): 26.4,
        (128, 64, 8): 33.6,
    },
    (128, 4096, 4096): {
        (128, 32, 1): 76.7,
        (128, 128, 4): 25.4,
        (128, 128, 6): 26.6,
        (128, 128, 8): 27.3,
        (128, 64, 4): 33.5,
    },
    (512, 4096, 4096): {
        (128, 128, 1): 51.5,
        (128, 128, 2): 37.7,
        (256, 128, 4): 41.2,
        (256, 256, 8): 57.8,
    },
    (64, 2048, 2048): {
        (64, 32, 1): 34.8,
        (64, 32, 4): 19.1,
        (64, 64, 8): 17.1,
        (64, 128, 16): 17.7,
    },
    (32, 4096, 4096): {(32, 32, 1): 60.5, (32, 64, 4): 26.3, (32, 128, 8): 21.7},
}


@pytest.mark.parametrize("shape", PREDICTED)
def test_cut_chosen_is_near_the_fastest_predicted(shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    times, machine = PREDICTED[shape], registry.machine("mi300x")
    cut = k_parts.choose((1, 1, rows, columns), depth, PAIR, machine, True, {})
    assert times[cut.rows, cut.columns, cut.parts] <= 1.05 * min(times.values())


def planned(machine: str, shape: tuple[int, ...], depth: int, hints: Hints | None = None) -> Plan:
    graph = Graph()
    a = graph.tensor((*shape[:-1], depth), bf16, arena="state", name="a")
    b = graph.tensor((*shape[:-2], shape[-1], depth), bf16, arena="state", name="b")
    c = graph.tensor(shape, bf16, name="c")
    graph.add("matmul", [a, b], [c], {"transpose_a": False, "transpose_b": True}, "product")
    graph.nodes[-1] = dataclasses.replace(graph.nodes[-1], hints=hints)
    task_plan = plan(graph, registry.machine(machine), {})
    verify([task_plan])
    return task_plan


def parts(task_plan: Plan) -> int:
    return task_plan.ops[0].params.get("splits", 1)


@pytest.mark.parametrize("machine", ["mi300x", "mi355x", "mi250x", "rx7900xtx"])
def test_few_tiles_are_cut_along_k(machine: str) -> None:
    task_plan = planned(machine, (128, 2048), 2048)
    first, second = task_plan.ops
    assert (first.kind, second.kind) == ("matmul", "elementwise") and parts(task_plan) > 1
    tasks = [t for listed in task_plan.phases[0].processors for t in listed]
    tiles = sum(t.op == first.id for t in tasks)
    assert tiles > parts(task_plan) and tiles % parts(task_plan) == 0
    # The op that sums a tile's parts waits for the parts of that tile only.
    assert min(threshold for t in tasks if t.op == second.id for _, threshold in t.waits) == parts(
        task_plan
    )


def test_enough_tiles_or_a_hint_keep_k_whole() -> None:
    assert parts(planned("mi300x", (128, 2048), 2048)) == 8
    assert parts(planned("mi300x", (4096, 4096), 2048)) == 1  # as many tiles as processors
    assert parts(planned("mi300x", (2, 128, 2048), 2048)) == 1  # only a single product may be split
    assert parts(planned("mi300x", (128, 2048), 64)) == 1  # one line of k
    assert parts(planned("mi300x", (128, 2048), 2048, Hints(tile=(128, 128)))) == 1
    assert parts(planned("a100", (128, 2048), 2048)) == 1


def prompt_layer(rows: int) -> list[PlanOp]:
    """Returns the ops of one layer for a prompt chunk planned for an MI300X, in the order of their
    tasks.
    """
    config = dataclasses.replace(
        builtin_config("llama-3.2-1b"),
        num_hidden_layers=1,
        vocab_size=512,
        bos_token_id=0,
        eos_token_ids=(1,),
    )
    (task_plan,) = plans(Shape(config, bf16, rows + 8, rows), registry.machine("mi300x"), None)
    used = {t.op for listed in task_plan.phases[0].processors for t in listed}
    return [op for op in task_plan.ops if op.id in used and ".layers.0." in op.name]


@pytest.mark.parametrize(("rows", "turned"), [(128, False), (512, True)])
def test_prompts_layer_takes_few_passes(rows: int, turned: bool) -> None:
    ops = {op.name.removeprefix("prompt.layers.0."): op for op in prompt_layer(rows)}
    products = {name: op.params for name, op in ops.items() if op.kind == "matmul"}
    qkv, gates = products["attention.query+key+value"], products["mlp.gate+up"]
    # The product that computes queries and keys also rotates them, unless splitting its k is
    # faster.
    assert bool(qkv.get("head_dim")) == turned and (qkv.get("splits", 1) == 1) == turned
    assert gates["gated"] and gates["tile"][1] == 128
    kinds = [op.kind for op in ops.values()]
    assert "swiglu_pairs" not in kinds and ("rope_kv" in kinds) == (not turned)
    # The residual is added by the op that sums the parts, or by the product.
    assert not any(name.endswith(".add") for name in ops)


def test_inputs_of_many_rows_are_rounded() -> None:
    def types(rows: int) -> set[str]:
        task_plan = planned_linear(rows)
        return {
            task_plan.tensors[op.operands[0]].dtype for op in task_plan.ops if op.kind == "matmul"
        }

    assert types(128) == {"bf16"} and types(64) == {"fp32"}


@pytest.mark.parametrize("machine", ["mi300x", "mi250x"])
def test_queries_of_many_rows_are_rounded_where_matrix_units_attend(machine: str) -> None:
    config = dataclasses.replace(builtin_config("llama-3.2-1b"), num_hidden_layers=1)

    def queries(rows: int) -> set[str]:
        task_plan = plans(Shape(config, bf16, rows + 1, rows, 0, 1), registry.machine(machine))[0]
        tiles = [op for op in task_plan.ops if op.kind == "attention_tiles"]
        return {task_plan.tensors[op.operands[0]].dtype for op in tiles}

    many = "bf16" if registry.machine(machine).has(Capability.ATTENTION_UNITS) else "fp32"
    assert queries(128) == {many} and queries(64) == {"fp32"}


def planned_linear(rows: int) -> Plan:
    graph = Graph()
    x = graph.tensor((rows, 256), fp32, arena="state", name="x")
    w = graph.tensor((128, 256), bf16, arena="parameter", name="w")
    y = graph.tensor((rows, 128), fp32, name="y")
    graph.add("matmul", [x, w], [y], {"transpose_a": False, "transpose_b": True}, "product")
    task_plan = plan(graph, registry.machine("mi300x"), {})
    verify([task_plan])
    return task_plan
