"""The alignment of the start of dynamic shared memory: it is requested from the toolchain, checked
in the ELF file that the toolchain writes, and checked by the kernel itself.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from ark.backend.codegen import layout
from ark.backend.codegen.dialect import Source
from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.errors import SystemError
from ark.ir.dtype import bf16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.plan.serialize import machine_of
from ark.runtime.faults import explain
from ark.runtime.tables import Tables

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import alignment, backend, compiler, machines

from tests import kept

TEXTS = {
    file.name: file.read_text()
    for folder in (resources.files("ark_cuda"), resources.files("ark_cuda").joinpath("tasks"))
    for file in folder.iterdir()
    if file.name.endswith(".h")
}


def elf(size: int, aligned: int, name: str = ".nv.shared.ark_loop") -> bytes:
    """An ELF file whose section has the given size and alignment, written as the standard of the
    ELF format says.
    """
    names = b"\0.shstrtab\0" + name.encode() + b"\0"
    head = b"\x7fELF\x02\x01" + bytes(34) + struct.pack("<Q", 64) + bytes(10)
    head += struct.pack("<HHH", 64, 3, 1)
    first, own, other = bytearray(64), bytearray(64), bytearray(64)
    struct.pack_into("<IIQQQQIIQQ", own, 0, 1, 3, 0, 0, 256, len(names), 0, 0, 1, 0)
    struct.pack_into("<IIQQQQIIQQ", other, 0, 11, 8, 3, 0, 0, size, 0, 0, aligned, 0)
    return head + first + own + other + names


def test_section_is_whole_and_aligned():
    assert alignment.check_alignment(elf(0x800, 1024), "ark_loop") == ""
    assert alignment.check_alignment(elf(0x400, 2048), "ark_loop") == ""
    assert alignment.check_alignment(elf(3, 1, ".nv.shared.other"), "ark_loop") == ""
    # The section that NVRTC 13.0.88 writes for `extern __shared__ __align__(1024) char[]` in
    # relocatable objects.
    assert "0x490 bytes, aligned to 16" in alignment.check_alignment(elf(0x490, 16), "ark_loop")
    assert "0x490 bytes" in alignment.check_alignment(elf(0x490, 1024), "ark_loop")
    assert "aligned to 512" in alignment.check_alignment(elf(0x800, 512), "ark_loop")


def test_invalid_elf_files_are_reported():
    whole = elf(0x800, 1024)
    for cut in range(len(whole) - 1):
        message = alignment.check_alignment(whole[:cut], "ark_loop")
        assert "not a readable ELF file" in message, cut


def test_check_and_the_prelude_agree():
    (asked,) = re.findall(r"ARK_SHARED_ALIGNMENT = (\d+)u;", TEXTS["prelude.h"])
    assert int(asked) == alignment.SHARED_ALIGNMENT_BYTES


def test_all_static_shared_memory_is_one_variable():
    """Device code declares all of its static shared memory in one variable. A second one could be
    placed before it and would move the start of dynamic shared memory.
    """
    declared = {
        (name, line.strip())
        for name, text in TEXTS.items()
        for line in text.splitlines()
        if re.match(r"[^/]*\b__shared__\b", line)
    }
    assert declared == {
        ("prelude.h", "__shared__ ArkStatic ark_static;"),
        ("prelude.h", "extern __shared__ __align__(1024) char ark_shared[];"),
    }


@pytest.mark.parametrize("arch, dtype", [("sm_80", bf16), ("sm_90a", bf16), ("sm_90a", fp32)])
def test_kernels_keep_their_alignment(arch, dtype):
    """After linking, the start of a kernel's dynamic shared memory is a multiple of 1024. (When
    other tests compile a kernel, the compiler checks it, too.)
    """
    graph = Graph()
    a, b = (graph.tensor((256, 256), dtype, arena="state", name=n) for n in "ab")
    c, e = (graph.tensor((256, 256), dtype, arena="state", name=n) for n in "ce")
    graph.add("matmul", [a, b], [c], {"transpose_a": False, "transpose_b": True}, "product")
    graph.add("softmax", [c], [e], {}, "softmax")
    named = (backend.machine(name) for name in backend.machine_names())
    model = next(m for m in named if m and m.arch == arch)
    task_plan = plan(graph, model)
    source = write(task_plan, machine_of(task_plan), backend.dialect(arch)).source
    for parts in (0, 1):
        target = Target(arch, machine_of(task_plan).threads)
        binary = kept.binary(backend, Source(source.text, parts=parts), target)
        sections = alignment._sections(binary.data)
        assert sections[".nv.shared.ark_loop"][1] == alignment.SHARED_ALIGNMENT_BYTES


@pytest.mark.parametrize("stages, nbytes, static", [(12, 16384, 2048), (24, 8192, 3072)])
def test_barriers_of_a_ring_have_room(stages, nbytes, static):
    """The static shared memory of a kernel has room for the barriers of its ring: with 24 slots it
    is 1024 bytes larger than with 12. The section is aligned to 1024.
    """
    graph = Graph()
    a, c = (graph.tensor((1, 256), bf16, arena="state", name=n) for n in "ac")
    b = graph.tensor((256, 256), bf16, arena="parameter", name="b")
    graph.add("matmul", [a, b], [c], {"transpose_a": False, "transpose_b": True}, "product")
    machine = machines.MODELS["h100"].shaped(stage_bytes=nbytes, stages=stages)
    planned = plan(graph, machine, {"variant": "block"})
    source = write(planned, machine_of(planned), backend.dialect("sm_90a")).source
    binary = kept.binary(backend, source, Target("sm_90a", machine_of(planned).threads))
    assert alignment._sections(binary.data)[".nv.shared.ark_loop"] == (static, 1024)


def test_compiler_that_loses_it_is_named():
    """The kernel's own check reports a compiler that does not align dynamic shared memory. The
    kernel here has 12 bytes of static memory and requests no alignment, so its ELF file is like one
    by NVRTC 13.0.
    """
    text = (
        "// ark_static_at<ArkParams\n"
        'extern "C" __global__ void ark_loop(int* p) {\n'
        "  __shared__ int own[3];\n  own[threadIdx.x % 3] = *p;\n  __syncthreads();\n"
        "  *p = own[1];\n}\n"
    )
    with pytest.raises(SystemError, match=r"NVRTC \d+\.\d+.* lost the alignment") as raised:
        backend.compiler().compile(Source(text), Target("sm_80", 32))
    assert "pip install -U nvidia-cuda-nvrtc" in str(raised.value)
    if compiler._linker() is not None:
        with pytest.raises(SystemError, match="nvJitLink"):
            backend.compiler().compile(Source(text, parts=1), Target("sm_80", 32))


# The kernel's own check. Like NVRTC, the host's compiler relies on a declared alignment.
HOST = r"""
typedef unsigned ark_u32;
#define ARK_DEVICE static inline
#define ARK_NO_TASK 0x7fffffffu
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
constexpr int ARK_BLOCK_WARPS = 4;
constexpr ark_u32 ARK_SHARED_ALIGNMENT = 1024u;
static struct { ark_u32 x; } threadIdx, blockIdx;
struct ArkParams { ark_u32 first; };
struct ArkCtx { const ArkParams* p; ark_u32 processor, iteration; };
static ark_u32 said[8], ran;
alignas(16) static char held[1024];
template <class T, int BEGIN, int END> T& ark_static_at() {
  return *reinterpret_cast<T*>(held + BEGIN);
}
extern char ark_shared[] __attribute__((aligned(1024)));
static void __syncthreads() {}
static unsigned long __cvta_generic_to_shared(void* p) {
  return reinterpret_cast<unsigned long>(p);
}
ARK_DEVICE void ark_report(const ArkCtx& c, ark_u32 at, ark_u32 why, ark_u32, ark_u32 expected,
                           ark_u32 seen) {
  const ark_u32 made[] = {at, why, expected, seen, c.processor, c.iteration};
  for (int i = 0; i < 6; ++i) said[i] = made[i];
}
static void ark_run(const ArkParams*, ark_u32, char*) { ran = 1; }
"""
CALLS = r"""
asm(".data\n.balign 1024\n.space OFFSET\n.globl ark_shared\nark_shared: .space 64\n.text\n");
extern "C" const ark_u32* run(ark_u32 thread) {
  threadIdx.x = thread, blockIdx.x = 3, ran = 0;
  for (ark_u32& word : said) word = 0;
  if (thread != 0) *reinterpret_cast<volatile ark_u32*>(held + 176) = OFFSET;  // by thread 0
  ark_loop(ArkParams{7});
  said[7] = ran;
  return said;
}
"""


@pytest.mark.parametrize("offset", [0, 16, 512])
@pytest.mark.parametrize("thread", [0, 5])
def test_kernel_looks_where_its_shared_memory_begins(offset, thread, tmp_path: Path):
    source, library = tmp_path / "entry.cpp", tmp_path / "entry.so"
    source.write_text(HOST + TEXTS["entry.h"] + CALLS.replace("OFFSET", str(offset)))
    words = ["g++", "-std=c++20", "-O2", "-shared", "-fPIC", "-Wl,-Bsymbolic"]
    subprocess.run([*words, source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.run.restype = ctypes.POINTER(ctypes.c_uint32)
    mailbox = np.ctypeslib.as_array(loaded.run(thread), (8,))
    assert mailbox[7] == (offset == 0), "bodies run on aligned memory alone"
    if offset and thread == 0:
        assert layout.ERROR_KINDS[int(mailbox[1])] == "alignment"
        assert mailbox[2] == 1024 and mailbox[3] % 1024 == offset
        assert (mailbox[4], mailbox[5]) == (3, 7)
    else:
        assert not mailbox[:6].any()


def test_error_names_compiler_and_fix():
    graph = Graph()
    a, b = (graph.tensor((8, 96), fp32, arena="state", name=n) for n in "ab")
    graph.add("relu", [a], [b], {}, "relu")
    row_plan = plan(graph, machines.MODELS["h100"])
    mail = np.zeros(1, layout.dtype("ArkHost"))[0]
    mail["error"] = next(n for n, kind in layout.ERROR_KINDS.items() if kind == "alignment")
    mail["error_task"] = mail["error_op"] = 0xFFFFFFFF
    mail["error_expected"], mail["error_seen"], mail["error_processor"] = 1024, 1168, 3
    message = explain(row_plan, Tables.__new__(Tables), mail, [], [], {})
    assert "begins at address 1168, which is not a multiple of 1024" in message
    assert "processor 3" in message and "ark doctor" in message
