"""`python nvrtc_check.py LIBRARY`: compiles kernels of two variants with that NVRTC. It prints the
version, the variants, and whether a minimum of three values keeps the negation of an operand.
"""

from __future__ import annotations

import ctypes
import sys

from ark_cuda import backend, machines

from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.ir.dtype import DataType, bf16, fp32, int32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.plan.serialize import machine_of
from tests.codegen.machine_code import section

H100 = machines.MODELS["h100"]
TARGET = Target("sm_90a", H100.threads)
ARENAS = {"d": "activation", "e": "activation", "f": "state"}


def kernel(dtype: DataType) -> str:
    """Compiles a product, a softmax and an elementwise op. Returns the variant's name."""
    graph = Graph()
    shapes = {"a": (256, 1024), "b": (1024, 1024)}
    a, b = (graph.tensor(s, dtype, arena="state", name=n) for n, s in shapes.items())
    c, e, f = (graph.tensor((256, 1024), dtype, arena="state", name=n) for n in "cef")
    graph.add("matmul", [a, b], [c], {"transpose_a": False, "transpose_b": True}, "product")
    graph.add("softmax", [c], [e], {}, "softmax")
    graph.add("relu", [c], [f], {}, "relu")
    planned = plan(graph, H100)
    source = write(planned, machine_of(planned), backend.dialect("sm_90a")).source
    backend.compiler().compile(source, TARGET)
    return planned.variant


def keeps_negations() -> bool:
    """True if the code of min(a, -b, c) differs from that of min(a, b, c), and likewise for maxima.

    NVRTC 13.0 to 13.3 lose the negation on sm_90a: they generate the same code for both.
    """

    def code(function: str, negated: bool) -> bytes:
        graph = Graph()
        a, b, c = (graph.tensor((256,), int32, arena="state", name=n) for n in "abc")
        d, e, f = (graph.tensor((256,), int32, arena=w, name=n) for n, w in ARENAS.items())
        if negated:
            graph.add("neg", [b], [d], {}, "negated")
        graph.add(function, [a, d if negated else b], [e], {}, "first")
        graph.add(function, [e, c], [f], {}, "second")
        joined = plan(graph, H100)
        assert len(joined.ops) == 1
        source = write(joined, machine_of(joined), backend.dialect("sm_90a")).source
        return section(backend.compiler().compile(source, TARGET).data, ".text.ark_loop")

    return all(code(f, True) != code(f, False) for f in ("minimum", "maximum"))


def main() -> None:
    ctypes.CDLL(sys.argv[1])  # the bindings use the library that the process already has
    print(" ".join(backend.compiler().key(TARGET).split()[:2]))
    print(*(kernel(dtype) for dtype in (fp32, bf16)), sep="\n")
    print("negated" if keeps_negations() else "negations are lost")


if __name__ == "__main__":
    main()
