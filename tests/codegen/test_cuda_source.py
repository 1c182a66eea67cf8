"""The loop compiles with NVRTC for every architecture, and the probe gives a reason for every
missing device.
"""

from __future__ import annotations

import dataclasses
import re
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest

from ark.backend.codegen.dialect import Source
from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.cli.doctor import bench as doctor
from ark.errors import SystemError
from ark.ir.dtype import by_name
from ark.ir.graph import Graph
from ark.lower.pipeline import plan as make_plan
from ark.machine.variant import COMPUTE, block
from ark.models.build import Shape
from ark.models.config import builtin_config
from ark.models.holding import quantised_config
from ark.models.plans import plans as llama_plans
from ark.plan.serialize import machine_of
from ark.plan.types import Phase, Plan, PlanCounter

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines, probe

from tests import kept
from tests.slow import slow

MODELS = sorted(machines.MODELS)


def empty_plan(machine):
    phases = (Phase("step", ((),) * machine.processors),)
    barrier = (PlanCounter(0, "iteration barrier", 1),)
    return Plan(0, 1, dataclasses.asdict(machine), (), (), (), barrier, phases, {})


def compile_for(machine, plan):
    emitted = write(plan, machine, backend.dialect(machine.arch))
    target = Target(machine.arch, machine.threads)
    return kept.binary(backend, emitted.source, target)


def test_every_architecture_has_a_model():
    assert {m.arch for m in machines.MODELS.values()} == set(backend.archs())


@pytest.mark.parametrize("name", MODELS)
def test_loop_compiles(name):
    machine = backend.machine(name)
    binary = compile_for(machine, empty_plan(machine))
    # Checks for an ELF file for NVIDIA GPUs (machine 190) that defines the entry point.
    assert binary.data[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", binary.data, 18)[0] == 190
    assert b"ark_loop\0" in binary.data
    spills = re.findall(r"(\d+) bytes spill stores", binary.log)
    assert spills and not any(int(s) for s in spills), binary.log


# Upper bounds of the bytes of spill stores in the kernels of Llama 3.2 1B, compiled by NVRTC 13.0
# or 13.5. Keys: the kernel variant, and the tokens of a prompt's chunk (0: the kernel only
# decodes). Values: the spills of the loop function, into which a decoder's task bodies are inlined;
# and of all functions, including the registers that a callee saves. If a change
# reduces the spills, its author reduces the figure here, too. The variant `roles` runs prompts only
# in short chunks; without prompts its loop must not spill.
SPILLS = {("block", 0): (128, 128), ("block", 64): (212, 1428), ("roles", 64): (136, 788)}


@slow  # the kernels that are shipped are below
@pytest.mark.parametrize(("variant", "chunk"), SPILLS)
def test_kernels_of_a_real_model_spill_no_more_than_they_did(variant, chunk):
    shape = Shape(builtin_config("llama-3.2-1b"), by_name("bf16"), 612, chunk)
    shape = dataclasses.replace(
        shape, config=dataclasses.replace(shape.config, num_hidden_layers=1)
    )
    (plan,) = llama_plans(shape, backend.machine("h100"), {"variant": variant})
    assert plan.variant == variant and len(plan.phases) == 1 + (chunk > 0)
    log = compile_for(machine_of(plan), plan).log
    matches = [int(s) for s in re.findall(r"(\d+) bytes spill stores", log)]
    loop, everywhere = SPILLS[variant, chunk]
    assert matches and matches[0] <= loop and sum(matches) <= everywhere, log


@slow
def test_prompts_are_a_kernel_of_their_own_whose_products_are_not_serialized():
    machine = backend.machine("h100")
    config = dataclasses.replace(builtin_config("llama-3.2-1b"), num_hidden_layers=1)
    (plan,) = llama_plans(Shape(config, by_name("bf16"), 612, 512), machine)
    assert [plan.variant_of(i) for i in range(3)] == ["matrix", "matrix", "roles"]
    phases, _ = plan.kernels
    target = machine_of(plan, 0)
    source = write(plan, target, backend.dialect(machine.arch), phases).source
    assert all(f"_{kind}_load(" in source.text for kind in ("matmul", "attention_tiles"))
    # The embedding is computed for four rows at once. The product of the head (logits) loads its
    # weights before its input row is complete.
    assert "ark_embedding_packs<4, 512," in source.text
    assert next(op.kind for op in plan.ops if op.name == "begin.head.logits") == "matmul"
    log = kept.binary(backend, source, Target(machine.arch, target.threads)).log
    loop = re.search(r"(\d+) bytes spill stores", log)
    # Allowed spills: values of the loop itself, which are stored once per task or iteration;
    # nothing in the inner loop of a product.
    assert loop and int(loop[1]) <= 160 and "serialized" not in log, log


@pytest.mark.parametrize("quantize", [None, "int4", pytest.param("fp8", marks=slow)])
def test_decoder_compiles_under_roles_without_spills(quantize):
    machine = backend.machine("h100")
    config = dataclasses.replace(builtin_config("llama-3.2-1b"), num_hidden_layers=1)
    shape = Shape(quantised_config(config, quantize, "it"), by_name("bf16"), 612, 0)
    (plan,) = llama_plans(shape, machine)
    assert plan.variant == "roles"
    log = compile_for(machine_of(plan), plan).log
    spills = re.findall(r"(\d+) bytes spill stores", log)
    assert spills and not any(int(s) for s in spills), log


def test_ring_can_be_left_out():
    machine = backend.machine("h100")
    machine = dataclasses.replace(machine, variants=(block(machine.variant.role(COMPUTE)),))
    assert machine.threads == 512
    assert compile_for(machine, empty_plan(machine)).data


def test_same_source_gives_the_same_bytes():
    machine = backend.machine("h100")
    first, second = (
        backend.compiler().compile(
            write(empty_plan(machine), machine, backend.dialect(machine.arch)).source,
            Target(machine.arch, machine.threads),
        )
        for _ in range(2)
    )
    assert first.data == second.data


SIDE_BY_SIDE = """
import threading
from ark.backend.protocol import Target
from ark.backend.codegen.dialect import Source
from ark_cuda import backend
source = Source('extern "C" __global__ void ark_loop() {}')
made, ready = [], threading.Barrier(4)
def work():
    ready.wait()
    made.append(backend.compiler().compile(source, Target("sm_90a", 32)).data[:4])
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert made == [b"\\x7fELF"] * 4, made
"""


def test_kernels_are_compiled_side_by_side_from_the_first_on():
    """Several kernels are compiled concurrently in a process that has not imported the compiler's
    package before.
    """
    done = subprocess.run([sys.executable, "-c", SIDE_BY_SIDE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_compilers_message_is_in_the_error():
    with pytest.raises(SystemError, match="undeclared_name"):
        backend.compiler().compile(
            Source('extern "C" __global__ void ark_loop() { undeclared_name(); }'),
            Target("sm_90a", 512),
        )


@pytest.mark.parametrize("arch", ["sm_11", "gfx942", "sm_90a -o x"])
def test_unknown_architecture_is_refused(arch):
    with pytest.raises(SystemError, match=re.escape(arch)):
        backend.compiler().compile(Source("int x;"), Target(arch, 512))


@pytest.mark.parametrize("name", MODELS)
def test_models_fit_their_hardware(name):
    machine = machines.MODELS[name]
    assert machine.ring_bytes % machine.stage_bytes == 0
    assert machine.shared_bytes - machine.ring_bytes >= 32 * 1024
    assert (machine.ring_bytes > 0) == (machine.arch != "sm_80")


def test_device_fills_in_the_nearest_model():
    h200 = machines.Reported("X", 9, 0, 130, 232448, 140 << 30, 4800.0)
    machine = machines.of_device(h200)
    assert (machine.processors, machine.memory_bytes) == (130, 140 << 30)
    assert machine.in_flight == machines.MODELS["h200"].in_flight
    ada = machines.of_device(machines.Reported("Y", 8, 9, 128, 101376, 24 << 30, 1000.0))
    assert (ada.arch, ada.ring_bytes) == ("sm_89", 0)
    small = machines.of_device(machines.Reported("Z", 12, 0, 48, 66 * 1024, 12 << 30, 500.0))
    assert small.ring_bytes == 0


class FakeDriver:
    """Returns results in the form of the driver API: (code, values...)."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_NO_DEVICE=100)
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
    )

    def __init__(self, init=0, version=13000, gpus=()):
        self.init, self.version, self.gpus = init, version, gpus

    def cuInit(self, flags):
        return (self.init,)

    def cuGetErrorString(self, code):
        return 0, b"system has unsupported display driver / cuda driver combination"

    def cuDriverGetVersion(self):
        return 0, self.version

    def cuDeviceGetCount(self):
        return 0, len(self.gpus)

    def cuDeviceGet(self, index):
        return 0, index

    def cuDeviceGetName(self, size, device):
        return 0, self.gpus[device][0].encode() + b"\0\0"

    def cuDeviceGetAttribute(self, attribute, device):
        return 0, self.gpus[device][1][attribute == "minor"]

    def cuDeviceTotalMem(self, device):
        return 0, 80 << 30


NVRTC = SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0))


@pytest.mark.parametrize(
    ("driver", "reason", "remedy"),
    [
        (FakeDriver(init=100), "no GPU", "CUDA_VISIBLE_DEVICES"),
        (FakeDriver(init=803), "driver combination", "restart"),
        (FakeDriver(version=12040, gpus=[("A", (9, 0))]), "CUDA 12.4", "580"),
        (FakeDriver(gpus=[("V100", (7, 0))]), "8.0", "cpu"),
    ],
)
def test_probe_says_why_there_is_no_gpu(driver, reason, remedy):
    report = probe._probe(driver, NVRTC)
    assert not report.devices
    assert reason in report.reason and remedy in report.remedy


def test_probe_lists_usable_gpus():
    report = probe._probe(FakeDriver(gpus=[("V100", (7, 0)), ("H100", (9, 0))]), NVRTC)
    assert [(d.index, d.name, d.arch) for d in report.devices] == [(1, "H100", "sm_90a")]
    assert not report.reason and "V100" in report.notes[0]


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    report = probe.probe()
    assert "cuda-python" in report.reason and "pip install" in report.remedy


@pytest.mark.parametrize("name", ["a100", "h100", "b200"])
def test_doctors_kernel_compiles(name):
    machine = backend.machine(name)
    machine = dataclasses.replace(machine, variants=(block(machine.variant.role(COMPUTE)),))
    target = Target(machine.arch, machine.threads)
    assert kept.binary(backend, doctor.source(machine, backend), target).data


def sums(offsets: list[int], arena: str = "state") -> Plan:
    """A plan with for each offset one sum y = x + x of the 256 fp32 elements of x that
    begin there.
    """
    graph = Graph()
    x = graph.tensor((512,), by_name("fp32"), arena=arena, name="x")
    for number, first in enumerate(offsets):
        part = graph.tensor(
            (256,), by_name("fp32"), buffer=x.buffer, extents=(512,), offsets=(first,)
        )
        y = graph.tensor((256,), by_name("fp32"), arena="state", name=f"y{number}")
        graph.add("add", [part, part], [y], {}, f"add{number}")
    return make_plan(graph, machines.MODELS["h100"], {"fuse": False})


@pytest.mark.parametrize(
    ("offsets", "arena", "asked"),
    [([0], "state", False), ([1], "state", True), ([0, 1], "state", True), ([4], "external", True)],
)
def test_alignment_is_tested_at_run_time_if_the_plan_does_not_know_it(offsets, arena, asked):
    planned = sums(offsets, arena)
    text = write(planned, machine_of(planned), backend.dialect("sm_90a")).source.text
    matches = set(re.findall(r"  if \(ark_aligned\((.*?)\)\) \{", text))
    assert "ark_hold_past(v0[u], p0" in text and any("operand" in f for f in matches) == asked
