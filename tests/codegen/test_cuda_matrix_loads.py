"""Which operands of products the loading thread of the variant `matrix` copies to shared memory
before a task begins, and the task records of a launch that state this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os

import numpy as np
import pytest

import ark
from ark.backend.codegen.writer import write
from ark.frontend.model import Model, use_model
from ark.ir.dtype import bf16
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.plan.kind import signature
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.cells import cells, map_cells
from ark.runtime.executor import Executor
from ark.runtime.tables import ALL, BESIDE, RIGHT, build

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines
from ark_cuda.tasks import products

GPU = bool(backend.probe().devices)
needs_gpu = pytest.mark.skipif(
    not GPU and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
H100 = machines.MODELS["h100"]

ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def chained(machine: Machine) -> Plan:
    """A plan of c = a b^T, e = softmax(c), g = e f^T. The left operand of g is computed in the same
    iteration, and softmax uses the memory of the ring's stages as scratch.
    """
    graph = Graph()
    shapes = {"a": (256, 1024), "b": (1024, 1024), "f": (512, 1024)}
    a, b, f = (graph.tensor(s, bf16, arena="state", name=n) for n, s in shapes.items())
    c, e, g = (
        graph.tensor((256, n), bf16, arena="state", name=name)
        for name, n in (("c", 1024), ("e", 1024), ("g", 512))
    )
    by_rows = {"transpose_a": False, "transpose_b": True}
    graph.add("matmul", [a, b], [c], by_rows, "first")
    graph.add("softmax", [c], [e], {}, "softmax")
    graph.add("matmul", [e, f], [g], by_rows, "second")
    planned = plan(graph, machine)
    verify([planned])
    return planned


def test_operands_written_in_the_iteration_are_not_loaded_early() -> None:
    """Of a product whose left operand is computed in the iteration, only the right operand is
    loaded before the task begins.
    """
    planned = chained(H100)
    assert planned.variant == "matrix"
    emitted = write(planned, machine_of(planned), backend.dialect("sm_90a"))
    maps = [emitted.maps[code] for code in emitted.opcode]
    assert {box.fetched for boxes in maps for box in boxes} == {256}
    tables = build(planned, emitted.opcode, lambda _: 0, lambda _: 0, maps, lambda _op, _map: 0)
    early = {planned.ops[t["op"]].name: int(t["growth"]) for t in tables.tasks}
    assert {name: early[name] for name in ("first", "softmax", "second")} == {
        "first": ALL,
        "softmax": 0,
        "second": RIGHT,
    }


def early_bits(graph: Graph, new: bool) -> dict[str, set[int]]:
    """Returns, by the op's name, the values of `growth` in the records of the op's tasks: bits that
    state which operands may be loaded before the task begins. All inputs and the last node's result
    are external. new: True if the result's memory is known to be new.
    """
    result = graph.nodes[-1].outputs[0].buffer
    external = [t.buffer.id for t in graph.tensors if t.buffer.arena == "state"]
    planned = plan(graph, H100, {"external": [*external, result.id], "variant": "matrix"})
    meta = {"fresh": [result.name]} if new else {}
    planned = dataclasses.replace(planned, meta={**planned.meta, **meta})
    emitted = write(planned, machine_of(planned), backend.dialect("sm_90a"))
    maps = [emitted.maps[code] for code in emitted.opcode]
    tables = build(planned, emitted.opcode, lambda _: 0, lambda _: 0, maps, lambda _op, _map: 0)
    bits: dict[str, set[int]] = {}
    for task in tables.tasks:
        bits.setdefault(planned.ops[task["op"]].name, set()).add(int(task["growth"]))
    return bits


def test_operands_are_loaded_beside_a_task_that_does_not_write_them() -> None:
    """Two products read the same rows, and the second one also reads the first one's result, as a
    gate. The weights are external, so they may be loaded before a task begins only if the result's
    memory is known to be new.
    """
    model = Model()
    with use_model(model):
        x, w, v = (ark.tensor((2048 if n == "x" else 1024, 1024), bf16, name=n) for n in "xwv")
        a = ark.softmax(x, name="softmax")
        gate = ark.sigmoid(ark.matmul(a, w, transpose_other=True, name="first"))
        gated = ark.matmul(a, v, transpose_other=True, name="second")
        ark.mul(gated, gate)
    graph = model.graph
    assert early_bits(graph, new=False)["second"] == {BESIDE}
    bits = early_bits(graph, new=True)
    assert bits["first"] == {RIGHT} and bits["second"] == {RIGHT | BESIDE}


def test_external_addresses_are_patched_in_task_records() -> None:
    """An op's external operands may have new addresses in each launch: each copy of the task table
    contains the addresses of its launch, and tensor maps for them.
    """
    graph = Graph()
    a = graph.tensor((512, 1024), bf16, arena="external", name="a")
    b = graph.tensor((512, 1024), bf16, arena="external", name="b")
    c = graph.tensor((512, 512), bf16, arena="external", name="c")
    graph.add("matmul", [a, b], [c], {"transpose_a": False, "transpose_b": True}, "product")
    planned = plan(graph, H100)
    verify([planned])
    emitted = write(planned, machine_of(planned), backend.dialect("sm_90a"))
    maps = [emitted.maps[code] for code in emitted.opcode]
    where = {buffer.id: (n + 1) << 20 for n, buffer in enumerate(planned.buffers)}
    map_at = lambda op, place: (1 << 30) + 128 * place  # noqa: E731
    tables = build(planned, emitted.opcode, where.__getitem__, lambda _: 0, maps, map_at)
    cells_of, words = cells(planned, tables), tables.tasks.view(np.int64)
    for tensor in planned.ops[0].operands:
        buffer = planned.tensors[tensor].buffer
        places = cells_of[buffer]
        assert places is not None
        assert len(places) == len(tables.tasks)
        assert set(words[places].tolist()) == {where[buffer]}
    places = map_cells(planned, tables, maps)
    assert len(places) == 2 * len(tables.tasks)
    assert set(words[places].tolist()) == {map_at(0, 0), map_at(0, 1)}


def test_lines_of_a_stage_are_fetched_alone() -> None:
    """The maps of a product of up to 64 rows, whose stages have several lines of each row, fetch
    128 bytes at a time. Those of other products fetch 256.
    """
    for rows, lines, fetched in ((16, 4, 128), (64, 2, 128), (256, 2, 256)):
        graph = Graph()
        a, b, c = (
            graph.tensor(shape, bf16, arena="state", name=name)
            for name, shape in (("a", (rows, 2048)), ("b", (2048, 2048)), ("c", (rows, 2048)))
        )
        graph.add("matmul", [a, b], [c], {"transpose_a": False, "transpose_b": True}, "product")
        planned = plan(graph, H100, {"variant": "matrix"})
        signatures = [signature(planned, op) for op in planned.ops if op.kind == "matmul"]
        maps = products.maps(signatures[0], machine_of(planned, 0))
        assert [(m.box[2], m.fetched) for m in maps] == [(lines, fetched)] * 2


@pytest.mark.parametrize(("unstaged", "spares"), [(16384, True), (0, False)])
def test_small_bodies_do_not_use_the_stages_memory(unstaged: int, spares: bool) -> None:
    planned = chained(H100)
    dialect = backend.dialect("sm_90a")
    assert dialect.unstaged == 16384
    emitted = write(planned, machine_of(planned), dataclasses.replace(dialect, unstaged=unstaged))
    opcode = {op.name: emitted.opcode[op.id] for op in planned.ops}
    condition = emitted.source.text.split("ark_spares_stages(ark_u32 kind) {")[1].split("}")[0]
    assert (f"kind == {opcode['softmax']}u" in condition) == spares


@needs_gpu
def test_chain_of_products_equals_numpy() -> None:
    device = backend.open(0)
    rng = np.random.default_rng(5)
    with contextlib.closing(device):
        planned = chained(device.machine)
        with Executor(planned, backend, device) as executor:
            arrays = {}
            for tensor in "abf":
                shape = executor.read(tensor).shape
                arrays[tensor] = rng.standard_normal(shape).astype(bf16.numpy)
                executor.write(tensor, arrays[tensor])
            runs = []
            for iterations in (1, 50):
                executor.start(iterations).wait(60)
                runs.append([executor.read(n).copy() for n in "ceg"])
    a, b, f = (arrays[t].astype(np.float64) for t in "abf")
    c, e, g = (x.astype(np.float64) for x in runs[0])
    np.testing.assert_allclose(c, a @ b.T, rtol=2**-7, atol=0.05)
    power = np.exp(c - c.max(-1, keepdims=True))
    np.testing.assert_allclose(e, power / power.sum(-1, keepdims=True), rtol=2**-7, atol=1e-6)
    np.testing.assert_allclose(g, e @ f.T, rtol=2**-7, atol=2**-8)
    for x, y in zip(*runs, strict=True):
        assert x.tobytes() == y.tobytes()
