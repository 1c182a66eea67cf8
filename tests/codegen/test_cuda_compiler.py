"""Kernels of many bodies: their functions are compiled separately and linked."""

from __future__ import annotations

import dataclasses
import re
import struct
from collections import Counter

import pytest

from ark.backend.codegen import writer
from ark.backend.codegen.dialect import Source
from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.ir.dtype import fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.plan.serialize import machine_of
from ark.runtime import program

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, compiler, machines
from ark_cuda.dialect import MAX_JOINT_BODIES

from tests import kept

H100 = machines.MODELS["h100"]
ELF_EXECUTABLE = 2  # e_type of an ELF file that needs no linking


def plan_and_source(bodies: int):
    """A plan with the given number of bodies, and its kernel's source."""
    graph = Graph()
    for n in range(bodies):
        a, b = (graph.tensor((8 + n, 96), fp32, arena="state", name=f"{x}{n}") for x in "ab")
        graph.add("relu", [a], [b], {}, f"relu{n}")
    drawn = plan(graph, H100)
    machine = machine_of(drawn)
    assert machine.variant.name == "block"
    emitted = write(drawn, machine, backend.dialect(H100.arch))
    assert len(emitted.bodies) == bodies
    return drawn, emitted.source


def test_only_kernels_of_many_bodies_are_compiled_separately():
    assert plan_and_source(MAX_JOINT_BODIES)[1].parts == 0
    assert plan_and_source(MAX_JOINT_BODIES + 1)[1].parts == 2


def beside_a_collective(product: bool, collective: bool):
    """Returns the plan of one rank and its source: a product, an all-reduce, or both in
    sequence.
    """
    plans = []
    for rank in range(2):
        graph = Graph(rank, 2)
        x, w = (graph.tensor((1024, 512), fp32, arena="state", name=name) for name in "xw")
        between = graph.tensor((1024, 1024), fp32, arena="activation", name="between")
        end = graph.tensor((1024, 1024), fp32, arena="symmetric", name="end")
        begin = between if product else graph.tensor((1024, 1024), fp32, arena="state", name="b")
        if product:
            attrs = {"transpose_a": False, "transpose_b": True}
            graph.add("matmul", [x, w], [begin if collective else end], attrs, "product")
        if collective:
            graph.add("all_reduce", [begin], [end], {"packet": False}, "sum")
        plans.append(plan(graph, machines.MODELS["h200"], {"lockstep": True, "overlap": False}))
    machine = machine_of(plans[0])
    return machine, write(plans[0], machine, backend.dialect(machine.arch)).source


def test_product_beside_a_collective_keeps_its_registers_in_the_loop():
    """If the loop and all bodies are compiled as one program, no function needs a stack. If they
    are compiled separately, only the product saves its callers' registers, and it does so once.
    """
    assert beside_a_collective(True, False)[1].parts == 0
    assert beside_a_collective(False, True)[1].parts == 0
    machine, source = beside_a_collective(True, True)
    assert source.parts == 1
    if compiler._linker() is None:
        pytest.skip("no nvJitLink of this NVRTC or later is installed")
    target = Target(machine.arch, machine.threads)
    frames = {}
    for parts in (0, 1):
        text = dataclasses.replace(source, parts=parts)
        log = compiler.NvrtcCompiler().compile(text, target).log
        sizes = re.findall(r"properties for (\S+)\n.*?(\d+) bytes stack frame", log)
        frames[parts] = {name: int(size) for name, size in sizes}
    assert "ark_loop" in frames[0] and not any(frames[0].values())
    assert {name for name, size in frames[1].items() if size} == {
        name for name in frames[1] if "matmul" in name
    }


def test_kernel_of_many_bodies_is_linked():
    if compiler._linker() is None:
        pytest.skip("no nvJitLink of this NVRTC or later is installed")
    source = plan_and_source(MAX_JOINT_BODIES + 1)[1]
    target = Target(H100.arch, H100.threads)
    one, second = (backend.compiler().compile(source, target) for _ in range(2))
    whole = kept.binary(backend, dataclasses.replace(source, parts=0), target)
    assert one.data == second.data != whole.data
    assert struct.unpack_from("<H", one.data, 16)[0] == ELF_EXECUTABLE
    assert b"ark_loop\0" in one.data
    heads = r"Function properties for \S*?(task_\d+_elementwise)"
    assert Counter(re.findall(heads, one.log)) == Counter(
        f"task_{n}_elementwise" for n in range(MAX_JOINT_BODIES + 1)
    )
    used = re.search(r"used (\d+) registers", one.log)
    assert used and int(used[1]) * target.threads <= 65536, one.log


def test_body_belongs_to_one_part_of_the_text():
    """If bodies are compiled in separate parts, the first part has the loop and declares the bodies
    of the other parts.
    """
    source = plan_and_source(3 * MAX_JOINT_BODIES)[1]
    assert source.parts == 3
    for n in range(3 * MAX_JOINT_BODIES):
        name = f"task_{n}_elementwise"
        before = source.text[: source.text.index(f" {name}(ArkCtx& c")]
        assert before.rstrip().endswith(("ARK_BODY void", "ARK_LINKED void"))
        part = re.findall(r"ARK_PART == (\d)", before)[-1]
        assert int(part) == n % 3
    many = plan_and_source(6 * MAX_JOINT_BODIES)[1]
    assert many.parts == 4


@pytest.mark.parametrize("form", ["ARK_BODY", "ARK_DEVICE"])
def test_parts_call_each_others_bodies(form: str):
    """A body in another part is a linked function, also if it would be inlined in the
    first part.
    """
    text = f"struct Own {{}};\n{form} void task_5_x(ArkCtx& c, const ArkTask& t) {{ task(); }}\n"
    assert writer._parted(text, "task_5_x", 0).count(form) == 1
    other = writer._parted(text, "task_5_x", 1)
    assert form not in other and other.count("ARK_LINKED void task_5_x(ArkCtx& c, const") == 2


def test_without_a_linker_it_is_one_program(monkeypatch: pytest.MonkeyPatch):
    source = Source('extern "C" __global__ void ark_loop() {}', parts=2)
    target = Target(H100.arch, H100.threads)
    key = backend.compiler().key(target)
    monkeypatch.setattr(compiler, "_linker", lambda: None)
    alone = dataclasses.replace(source, parts=0)
    compiled = [backend.compiler().compile(s, target).data for s in (source, alone)]
    assert compiled[0] == compiled[1]
    assert "nvjitlink" not in backend.compiler().key(target)
    monkeypatch.setattr(compiler, "_linker", lambda: (13, 5))
    assert "nvjitlink 13.5" in backend.compiler().key(target)
    assert key.split()[0] == "nvrtc"


@pytest.mark.parametrize("threads, registers", [(512, 128), (544, 120), (384, 168), (128, 255)])
def test_separate_function_keeps_within_its_threads_share(threads: int, registers: int):
    """The limit of registers per thread of a separately compiled function, for a number of threads
    in the block. The driver allocates registers to a warp in units of 256, and a thread has at most
    255.
    """
    assert compiler._registers(threads) == registers


def test_cache_tells_them_apart(monkeypatch: pytest.MonkeyPatch):
    drawn, source = plan_and_source(MAX_JOINT_BODIES + 1)
    machine = machine_of(drawn)
    phases = range(len(drawn.phases))
    name = program._emitted(drawn, machine, backend, H100.arch, phases)[2]
    emitted = write(drawn, machine, backend.dialect(H100.arch))
    other = dataclasses.replace(emitted, source=dataclasses.replace(source, parts=0))
    monkeypatch.setattr(program, "write", lambda *_: other)
    assert program._emitted(drawn, machine, backend, H100.arch, phases)[2] != name
