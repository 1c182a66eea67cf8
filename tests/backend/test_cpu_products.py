"""Matrix products on a CPU, whose operands are first copied to panels (small blocks in the order in
which the inner loop reads them). They are compared with NumPy for every instruction set that this
machine can execute; for other instruction sets they are only compiled.
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import ark
from ark.backend import registry
from ark.backend.codegen.writer import write
from ark.frontend.model import Model, use_model
from ark.frontend.tensor import Tensor
from ark.lower.pipeline import plan
from tests.cases.cpu_products import product
from tests.opcheck import Case, check
from tests.slow import slow

# Compiler options by name. Each entry excludes more instruction sets than the one before: first the
# widest, then narrower ones.
SETS = {
    "host": "",
    "vectors": "-mno-amx-bf16",
    "floats": "-mno-amx-bf16 -mno-avx512bf16 -mno-avx512vnni",
    "avx2": "-mno-avx512f",
    "baseline": "-march=x86-64",
}
X86 = platform.machine() == "x86_64"
ARM = ("generic", "generic+dotprod+bf16")


def products() -> list[Case]:
    """Returns products whose matrices are smaller than a panel, a product of each kind with several
    panels, and products whose k is split into several parts.
    """
    cases = [
        product(m, n, k, transposes, dtype)
        for dtype, k in ((ark.fp32, 301), (ark.bf16, 531), (ark.fp16, 77), (ark.int8, 1103))
        for transposes, m, n in (("nn", 37, 71), ("nt", 4, 35), ("tn", 65, 33), ("tt", 50, 129))
    ]
    cases.append(product(64, 96, 64, "nn", ark.bf16, then=True))
    cases.append(product(33, 30, 1, "nt", ark.int8))
    cases.append(product(96, 64, 3, "tn", ark.fp32, then=True))
    return cases


@pytest.mark.parametrize("units", ["host", *(pytest.param(s, marks=slow) for s in [*SETS][1:])])
def test_products_equal_numpy(units: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if SETS[units] and not X86:
        pytest.skip("these flags are of another processor")
    monkeypatch.setenv("ARK_CPU_FLAGS", f"-O1 {SETS[units]}")
    ark.init(backend="cpu")
    check(products())


REFUSED = """
import ctypes, numpy as np
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
held = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.addressof(held), 0, 8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
REQUEST, TILE_DATA = 0x1023, 18
assert ctypes.CDLL(None).syscall(158, REQUEST, TILE_DATA) != 0, "the system gave leave"
from tests.cases.cpu_products import product
from tests.opcheck import check
import ark
ark.init(backend="cpu")
check([product(37, 71, 200, "nt", ark.bf16), product(37, 71, 200, "nn", ark.int8)])
"""


@slow
@pytest.mark.skipif(not X86 or sys.platform != "linux", reason="a call of Linux on x86-64")
def test_products_equal_numpy_if_amx_is_not_granted() -> None:
    """In a process that may not use AMX tile registers, because its signal stack is too small for
    them, products are computed by vectors.
    """
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@slow
@pytest.mark.parametrize("features", ARM)
def test_products_compile_for_arm(features: str, tmp_path: Path) -> None:
    if not importlib.util.find_spec("ziglang"):
        pytest.skip("there is no ziglang")
    model = Model()
    with use_model(model):
        for case in products():
            given = [
                Tensor(
                    model.graph.tensor(a.shape, dtype, arena="state", name=f"{case.name}{i}"), model
                )
                for i, (a, dtype) in enumerate(case.inputs)
            ]
            case.build(*given)
    backend = registry.get("cpu")
    machine = backend.machine("cpu-1")
    assert machine is not None
    text = write(plan(model.graph, machine), machine, backend.dialect(machine.arch)).source.text
    source = tmp_path / "loop.cpp"
    source.write_text(text)
    words = ["-target", "aarch64-linux-gnu", f"-mcpu={features}", "-std=c++17", "-O1", "-w"]
    command = [sys.executable, "-m", "ziglang", "c++", *words, "-S", str(source)]
    output = tmp_path / "loop.s"
    done = subprocess.run([*command, "-o", str(output)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("bfdot", "sdot"):
        assert (name in output.read_text()) == ("dotprod" in features)
