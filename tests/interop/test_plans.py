"""The five networks of tests.interop.models, planned as torch programs for machines that are not
present. The planned kernels must let each launch continue the counters of the launch before, so
that these need not be reset.
"""

from __future__ import annotations

from functools import cache

import pytest

import ark
from ark.backend import registry
from ark.ir.dtype import bf16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan as make_plan
from ark.plan.serialize import machine_of
from ark.runtime.executor import counts_on

torch = pytest.importorskip("torch")
from ark.interop.torch.export import export  # noqa: E402
from ark.interop.torch.graph import Built, build, drop_checks  # noqa: E402
from ark.interop.torch.values import Value, own  # noqa: E402
from tests.cases.torch_plans import planned  # noqa: E402
from tests.interop import models  # noqa: E402
from tests.slow import in_turns, slow  # noqa: E402

MACHINES = registry.get("cuda").machine_names()
LARGE = ("bert", "gpt2")


@cache
def built(name: str) -> Built:
    """Builds the network of that name as ark.from_torch does."""
    module, example = models.seasoned_model(name)
    graph = export(module, (example,), False).graph_module
    drop_checks(graph)
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    result = build(graph, values)
    taken: set[int] = set()
    with ark.use_model(result.model):
        result.outputs = [own(v, taken) if isinstance(v, Value) else v for v in result.outputs]
    return result


# `nox` plans each of the smaller networks for one machine, in turn.
@pytest.mark.parametrize(("machine", "name"), [
    *in_turns(MACHINES, [(m,) for m in models.MODELS if m not in LARGE]),
    *(pytest.param(machine, m, marks=slow) for m in LARGE for machine in MACHINES),
])  # fmt: skip
def test_launches_of_a_program_continue_the_counters(machine: str, name: str) -> None:
    if name in LARGE:
        pytest.importorskip("transformers")
    network = built(name)
    places = [v for v in (*network.inputs, *network.outputs) if isinstance(v, Value)]
    plan = planned(network.model, places, registry.machine(machine))
    assert len(plan.ops) > 5
    assert counts_on(plan)


def large() -> ark.Model:
    """Returns a model of two linear layers of 256 rows in bf16."""
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor((256, 512), ark.bf16)
        for _ in range(2):
            x = ark.relu(ark.linear(x, ark.tensor((512, 512), ark.bf16)))
    return model


@pytest.mark.parametrize(
    ("machine", "boxes", "variant"),
    [("h100", True, "matrix"), ("b200", True, "matrix"), ("h100", False, "block"),
     ("a100", True, "block"), ("mi300x", True, "block")],
)  # fmt: skip
def test_large_products_use_warpgroups_and_continue_the_counters(
    machine: str, boxes: bool, variant: str
) -> None:
    """Large products of a torch program are planned for warpgroups if all memory is aligned for box
    copies, otherwise for the variant `block`, which reads by ordinary loads. boxes: True if the
    memory is aligned.
    """
    plan = planned(large(), [], registry.machine(machine), boxes=boxes)
    assert plan.variant == variant
    assert counts_on(plan)


@pytest.mark.parametrize(
    ("width", "machine", "processors"),
    [
        (32, "cpu-8", 1),
        (256, "cpu-8", 2),
        (1024, "cpu-8", 8),
        (1024, "cpu-2", 2),
        (32, "a100", 108),
    ],
)
def test_small_graph_is_planned_for_few_threads(width: int, machine: str, processors: int) -> None:
    """A small graph is planned for as few threads as it can keep busy. By the machine model (0.05
    TFLOP/s for each thread), width 32 takes 10 us, 256 takes 0.7 ms, 1,024 takes 11 ms. If
    processors are not threads of a CPU, all are used.
    """
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor((128, width))
        for _ in range(2):
            x = ark.relu(ark.linear(x, ark.tensor((width, width))))
    assert planned(model, [], registry.machine(machine)).processors == processors


def test_ops_keep_the_processors_of_their_context() -> None:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.exp(ark.tensor((8, 8)))
        with ark.PlannerContext(processor_range=[2, 4]):
            ark.exp(x)
    assert planned(model, [], registry.machine("cpu-4")).processors == 4


def test_plan_with_a_ring_resets_its_counters() -> None:
    """A plan whose weights are loaded by the ring, under the machine's first variant, cannot
    continue the counters of the launch before, so they are reset.
    """
    graph = Graph()
    row = graph.tensor((1, 256), fp32, arena="state", name="row")
    weights = graph.tensor((512, 256), bf16, arena="parameter", name="weights")
    out = graph.tensor((1, 512), fp32, arena="state", name="out")
    graph.add("matmul", [row, weights], [out], {"transpose_a": False, "transpose_b": True})
    plan = make_plan(graph, registry.machine("h100").using("block"))
    assert machine_of(plan).ring_bytes
    assert not counts_on(plan)
