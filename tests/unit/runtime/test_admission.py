"""Plans from outside are data: invalid plans and plans for other devices are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ark.backend import registry
from ark.backend.codegen.shared_memory import check_shared_memory
from ark.errors import PlanError
from ark.ir.dtype import bf16, by_name, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.models.build import Shape
from ark.models.plans import make_plans
from ark.plan.program import difference
from ark.plan.serialize import from_dict, from_json, machine_of, to_dict, to_json
from ark.plan.verify import verify
from ark.runtime.admission import admit
from tests.unit.plan.shapes import CONFIG

Data = dict[str, Any]


@pytest.fixture(scope="module")
def data() -> Data:
    """Returns the small decoder's plan for two processors of a CPU, in the form of a plan file."""
    shape = Shape(CONFIG, by_name("fp32"), 64, 4, 0, 1)
    return json.loads(to_json(make_plans(shape, registry.machine("cpu-2"))[0]))


def op(data: Data, kind: str) -> list[Any]:
    """Returns the first op of a kind as in the file: name, kind, parameters, operands, after."""
    return next(o for o in data["ops"] if o[1] == kind)


def tasks(data: Data, kind: str) -> list[list[Any]]:
    """Returns all tasks of a kind."""
    return [
        task
        for phase in data["phases"]
        for processor in phase["processors"]
        for task in processor
        if data["ops"][task[0]][1] == kind
    ]


def machine(**fields: object) -> Callable[[Data], None]:
    return lambda data: data["machine"].update(fields)


def ring(**fields: object) -> Callable[[Data], None]:
    return lambda data: data["machine"]["variants"][0].update(fields)


def params(kind: str, **fields: object) -> Callable[[Data], None]:
    return lambda data: op(data, kind)[2].update(fields)


def coord(kind: str, place: int, value: int) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        tasks(data, kind)[0][1][place] = value

    return change


def operand(kind: str, place: int, other: int) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        listed = op(data, kind)[3]
        listed[place] = listed[other]

    return change


def tensor(kind: str, place: int, field: int, value: object) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        data["tensors"][op(data, kind)[3][place]][field] = value

    return change


def buffers(arena: str, field: int, value: object) -> Callable[[Data], None]:
    def change(data: Data) -> None:
        next(b for b in data["buffers"] if b[1] == arena)[field] = value

    return change


def drop_tile(kind: str) -> Callable[[Data], None]:
    """Returns a change that drops one tile of an op, on whichever processor it is."""

    def change(data: Data) -> None:
        victim = tasks(data, kind)[-1]
        for phase in data["phases"]:
            for processor in phase["processors"]:
                if victim in processor:
                    processor.remove(victim)
                    return

    return change


CODE = '1; } struct Evil { Evil() { system("touch /tmp/owned"); } } evil; void f() {'

HOSTILE: dict[str, Callable[[Data], None]] = {
    "code in the machine": ring(in_flight=CODE),
    "code in a name of the machine": machine(arch="x86_64\n#include </etc/passwd>"),
    "code in rows": params("advance", rows=CODE),
    "code in tiles": params("choose", tiles=CODE),
    "an include in a word": params("linear", epilogue='\n#include "/etc/passwd"\n'),
    "an unknown parameter": params("advance", more=1),
    "an unknown field": lambda data: data.update(extra=1),
    "an unknown machine field": machine(extra=1),
    "an unknown field of its variant": ring(extra=1),
    "another ring than the machine has": ring(stages=4),
    "a variant that the machine has not": ring(name="matrix"),
    "no variants": machine(variants=[]),
    "no computing warps": ring(roles=[]),
    "a lot of warps": ring(roles=[{"name": "compute", "warps": 1 << 20, "registers": 0}]),
    "a number as text": machine(processors="2"),
    "a truth value for a number": params("advance", rows=True),
    "a float for a number": params("advance", rows=4.5),
    "no lanes": machine(lanes=0),
    "other lanes than the machine has": machine(lanes=2),
    "other shared memory than the machine has": machine(shared_bytes=1 << 20),
    "a hundred million tiles": params("choose", tiles=100_000_000),
    "tiles that are not there": params("choose", tiles=3),
    "odd rows of pairs": params("linear", rows=3),
    "rows beyond the schema": params("linear", rows=1 << 40),
    "a scale that is no number": params("attention", scale="1.0f"),
    "a prologue that is not there": params("linear", prologue="exp(a); abort"),
    "an operand twice": operand("linear", 0, 2),
    "the keys as values": operand("attention", 4, 1),
    "an operand less": lambda data: op(data, "attention")[3].pop(),
    "an operand more": lambda data: op(data, "choose")[3].append(0),
    "another type": tensor("embedding", 0, 1, "fp32"),
    "a rank more": tensor("choose", 2, 2, [1, 1]),
    "a row tile that is not there": coord("attention", 2, 7),
    "a coordinate below": coord("choose", 0, -1),
    "a coordinate more": lambda data: tasks(data, "choose")[0][1].append(0),
    "a coordinate between tiles": coord("linear", 0, 1),
    "a tile left out": drop_tile("choose"),
    "a misaligned buffer": buffers("state", 3, 4),
    "memory that claims to hold data": buffers("activation", 5, 1),
    "memory that claims to hold none": buffers("parameter", 5, 0),
    "memory without end": buffers("state", 2, 1 << 60),
    "an offset below": buffers("state", 3, -4096),
    "a control character in a name": lambda data: op(data, "choose").__setitem__(0, "a\x1b[2J"),
    "a name that is no text": lambda data: op(data, "choose").__setitem__(0, "\udc80"),
    "a long name": lambda data: op(data, "choose").__setitem__(0, "a" * 10000),
    "a meta that is no number": lambda data: data["meta"].update(context="64"),
    "ranges for other ops": lambda data: data["meta"].update(processor_ranges=[None]),
    "no phases": lambda data: data.update(phases=[]),
    "a phase without processors": lambda data: data["phases"][0].update(processors=[]),
}


@pytest.mark.parametrize("machine", ["h100", "mi300x"])
def test_plan_without_an_operand_stream_is_admitted_without_a_ring(machine: str) -> None:
    graph = Graph()
    x = graph.tensor((64,), fp32, arena="state", name="x")
    out = graph.tensor((64,), fp32, arena="state", name="out")
    graph.add("exp", [x], [out])
    planned = make_plan(graph, registry.machine(machine))
    assert machine_of(planned, 0).variant.stages == 0
    admit([from_json(to_json(planned))])


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_plans_are_refused_in_a_paragraph(
    data: Data, change: Callable[[Data], None]
) -> None:
    changed = copy.deepcopy(data)
    change(changed)
    assert changed != data
    with pytest.raises(PlanError) as raised:
        admit([from_json(json.dumps(changed))])
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 1000


def test_plan_itself_is_admitted(data: Data) -> None:
    plan = from_json(json.dumps(data))
    admit([plan], registry.machine("cpu-4"))
    assert json.loads(to_json(plan)) == data


@pytest.mark.parametrize("name", ["mi300x", "a100", "h100"])
def test_plan_for_another_device_is_refused_before_anything_is_compiled(name: str) -> None:
    shape = Shape(CONFIG, by_name("fp32"), 64, 4, 0, 1)
    plan = make_plans(shape, registry.machine(name))[0]
    with pytest.raises(PlanError, match=rf"made for {name} .* runs on cpu-1 .*plan again"):
        admit([plan], registry.machine("cpu-1"))
    admit([plan])  # valid if no device is given


def test_changed_parameter_makes_another_program(data: Data) -> None:
    """A plan with a changed parameter is valid, but `difference` reports that its program is
    another one.
    """
    plan = from_dict(data)
    assert difference(plan, plan) is None
    changed = copy.deepcopy(data)
    op(changed, "attention")[2]["scale"] *= 2
    other = from_dict(changed)
    admit([other])
    assert str(difference(other, plan)).startswith(
        "op 'prompt.layers.0.attention.attention' differs"
    )


def product(m: int, k: int, n: int, made_for: Machine) -> Graph:
    graph = Graph()
    x = graph.tensor((m, k), fp32, arena="state", name="x")
    w = graph.tensor((n, k), bf16, arena="parameter", name="w")
    out = graph.tensor((m, n), fp32, arena="state", name="out")
    graph.add("matmul", [x, w], [out], {"transpose_a": False, "transpose_b": True})
    return graph


@pytest.mark.parametrize("name", ["mi300x", "mi355x", "rx7900xtx", "h100", "a100", "rtx5090"])
@pytest.mark.parametrize("shape", [(4, 4000, 64), (4, 3984, 64), (1, 16000, 64), (64, 4096, 4096)])
def test_plans_fit_the_memory_of_a_processor(name: str, shape: tuple[int, int, int]) -> None:
    """The shared memory of the loop and a vendor body's scratch are added: (4, 4000) by (64, 4000)
    needed 65,568 of a gfx942's 65,536 bytes.
    """
    made_for = registry.machine(name)
    plan = make_plan(product(*shape, made_for), made_for)
    verify([plan])
    dialect = registry.get(made_for.backend).dialect(made_for.arch)
    check_shared_memory(plan, machine_of(plan), dialect)


def test_plan_that_needs_more_than_a_processor_has_is_not_admitted() -> None:
    made_for = registry.machine("mi300x")
    plan = make_plan(product(4, 3000, 64, made_for), made_for)
    data = to_dict(plan)
    dialect = registry.get("rocm").dialect("gfx942")
    data["machine"]["shared_bytes"] = 48000 - 1536
    with pytest.raises(PlanError, match="bytes of shared memory"):
        check_shared_memory(from_dict(data), machine_of(from_dict(data)), dialect)


def test_reading_a_plan_needs_a_plan(tmp_path: Path) -> None:
    for text in ("[" * 100000, "[]", "null", '{"format": 1}', '{"format": NaN}', '"' + "x" * 10):
        with pytest.raises(PlanError):
            from_json(text)


@pytest.mark.parametrize(
    "expr",
    [
        ["number", 10**400],
        ["number", True],
        ["number", "1; } void f() {"],
        ["input", 9],
        ["system", ["input", 0]],
        ["add", ["input", 0]],
        ["cast", "fp32; #include", ["input", 0]],
        [["input", 0]],
        "input",
        [],
    ],
    ids=str,
)
def test_expression_of_a_file_never_becomes_code(expr: object) -> None:
    graph = Graph()
    x = graph.tensor((8,), fp32, arena="state", name="x")
    out = graph.tensor((8,), fp32, arena="state", name="out")
    graph.add("exp", [x], [out])
    made_for = registry.machine("cpu-2")
    data = json.loads(to_json(make_plan(graph, made_for)))
    admit([from_dict(data)])
    op(data, "elementwise")[2]["expr"] = expr
    with pytest.raises(PlanError):
        admit([from_dict(data)])
