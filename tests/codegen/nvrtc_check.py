"""`python nvrtc_check.py LIBRARY`: compiles kernels of two variants with that NVRTC, and prints its
version and the variants.
"""

from __future__ import annotations

import ctypes
import sys

from ark_cuda import backend, machines

from ark.backend.protocol import Target
from ark.codegen.writer import write
from ark.ir.dtype import DataType, bf16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.plan.serialize import machine_of

H100 = machines.MODELS["h100"]
TARGET = Target("sm_90a", H100.threads)


def kernel(dtype: DataType) -> str:
    """Compiles a product and a softmax; the variant's name."""
    graph = Graph()
    shapes = {"a": (256, 1024), "b": (1024, 1024)}
    a, b = (graph.tensor(s, dtype, arena="state", name=n) for n, s in shapes.items())
    c, e = (graph.tensor((256, 1024), dtype, arena="state", name=n) for n in "ce")
    graph.add("matmul", [a, b], [c], {"transpose_a": False, "transpose_b": True}, "product")
    graph.add("softmax", [c], [e], {}, "softmax")
    made = plan(graph, H100)
    source = write(made, machine_of(made), backend.dialect("sm_90a")).source
    backend.compiler().compile(source, TARGET)
    return made.variant


def main() -> None:
    ctypes.CDLL(sys.argv[1])  # the bindings use the library that the process already has
    print(" ".join(backend.compiler().key(TARGET).split()[:2]))
    print(*(kernel(dtype) for dtype in (fp32, bf16)), sep="\n")


if __name__ == "__main__":
    main()
