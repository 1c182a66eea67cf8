"""Runs whole blocks of CUDA's task bodies on a CPU, one task after another. The source is the one
that a GPU gets, with functions in place of instructions (block_on_host.h).
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import subprocess
from pathlib import Path

import numpy as np
from ark_cuda import backend

from ark.backend.codegen import layout
from ark.backend.codegen.writer import write
from ark.ir.dtype import by_name
from ark.plan.serialize import machine_of
from ark.plan.types import Plan, PlanOp, PlanTensor
from tests.cuda_on_host import SHIM, assembly, parts

BLOCK = Path(__file__).parent / "block_on_host.h"
KNOWN = frozenset(re.findall(r"^static void (\w+)\(", BLOCK.read_text(), re.MULTILINE))
"""The instructions for which block_on_host.h has functions."""
ENTRY = """
__attribute__((aligned(1024))) char ark_shared[1 << 18];
static const ArkTask* host_task;
static ArkCtx host_context;
static void host_dispatch() { ark_dispatch(host_context, *host_task); }
extern "C" void run(const ArkTask* task, int late, int downwards) {
  host_task = task;
  std::memset(ark_shared, 0x7f, sizeof(ark_shared));
  host_run(ARK_THREADS, late != 0, downwards != 0, host_dispatch);
}
"""


def on_host(text: str) -> str:
    """Converts device source to C++ for whole blocks."""
    shim = f"#define HOST_BLOCK 1\n{SHIM.read_text()}{BLOCK.read_text()}"
    return shim + assembly(text, statement)


def statement(inside: str) -> str:
    """Converts an assembly statement to C++: a call of the function with its instruction's name."""
    template, results, given = parts(inside)
    words = re.fullmatch(r"\s*([\w.:]+)\s*(.*?);\s*", template, re.DOTALL)
    name = re.sub(r"\W", "_", words[1]) if words else ""
    if not words or name not in KNOWN:
        return f"host_wrong({template!r})".replace("'", '"') if template.strip() else "(void)0"
    operands = [*results, *given]
    listed = re.sub(r"[][{}]", "", words[2])
    arguments = [w.strip() for w in listed.split(",")] if listed.strip() else []
    return f"{name}({', '.join(operands[int(a[1:])] if a[0] == '%' else a for a in arguments)})"


class Block:
    """Runs the tasks of a plan in a thread block that the host simulates.

    memory: by id, the bytes of the buffers, which begin at a multiple of 16 bytes. tensors: by id,
    their elements in this memory. Tasks read and change these arrays.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        machine = machine_of(plan)
        dialect = dataclasses.replace(backend.dialect(machine.arch), entry=ENTRY)
        emitted = write(plan, machine, dialect)
        self.opcode = emitted.opcode
        source, library = folder / "block.cpp", folder / "block.so"
        source.write_text(on_host(emitted.source.text))
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-w"]
        subprocess.run([*command, source, "-o", library], check=True)
        self.library = ctypes.CDLL(str(library))
        self.memory = [_memory(buffer.nbytes) for buffer in plan.buffers]
        self.tensors = [_view(tensor, self.memory[tensor.buffer]) for tensor in plan.tensors]

    def operand(self, op: PlanOp, index: int) -> np.ndarray:
        return self.tensors[op.operands[index]]

    def named(self, name: str) -> np.ndarray:
        """The only tensor with the given name."""
        (actual,) = (t.id for t in self.plan.tensors if t.name == name)
        return self.tensors[actual]

    def run(self, op: PlanOp, late: bool = False, downwards: bool = False) -> None:
        """Runs the op's tasks in the plan's order."""
        listed = (t for phase in self.plan.phases for own in phase.processors for t in own)
        for task in (t for t in listed if t.op == op.id):
            record = np.zeros(1, layout.dtype("ArkTask"))
            record["kind"] = self.opcode[op.id]
            record["coord"][0, : len(task.coord)] = task.coord
            addresses = [self.operand(op, i).ctypes.data for i in range(len(op.operands))]
            record["operand"][0, : len(addresses)] = addresses
            self.library.run(ctypes.c_void_p(record.ctypes.data), int(late), int(downwards))


def _view(tensor: PlanTensor, memory: np.ndarray) -> np.ndarray:
    """A view of a tensor's elements in its buffer's memory."""
    kind = np.dtype(by_name(tensor.dtype).numpy)
    count = int(np.prod(tensor.extents))
    whole = memory[: count * kind.itemsize].view(kind).reshape(tensor.extents)
    return whole[tuple(slice(o, o + n) for o, n in zip(tensor.offsets, tensor.shape, strict=True))]


def _memory(nbytes: int) -> np.ndarray:
    result = np.zeros(nbytes + 16, np.uint8)
    return result[-result.ctypes.data % 16 :][:nbytes]
