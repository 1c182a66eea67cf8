"""The source dialect of NVIDIA GPUs: prelude, ring, entry point and the vendor's task bodies.

Called by the source writer (ark.backend.codegen) through the backend object. The dialect's text is
the same for every architecture; the machine's capabilities describe an architecture's features.
"""

from __future__ import annotations

from importlib import resources

from ark.backend.codegen.dialect import Dialect
from ark_cuda.tasks import BODIES, matrix_ring
from ark_cuda.tasks.stages import SLABS_BYTES

# A kernel with more bodies (device functions of tasks) than this is compiled in several programs.
# In one program, a body's registers and stack frame would depend on all callers in the kernel, and
# the compile time would grow with the square of the number of bodies.
MAX_JOINT_BODIES = 16
# The largest number of different wgmma products with which a kernel compiles fast. The products are
# inlined into one function: 28 of them compile in 40 s of CPU time, 87 in more than 300 s.
MAX_JOINT_PRODUCTS = 16
# A kernel with both of these task kinds is compiled in several programs. In one program with a
# combine, a product gets so few registers that it spills in each step of k.
APART = frozenset({"combine", "matmul"})


def _text(name: str) -> str:
    return resources.files("ark_cuda").joinpath(name).read_text()


def dialect(arch: str) -> Dialect:
    """The dialect for `arch` (sm_80, sm_90a, ...)."""
    return Dialect(
        name=f"cuda {arch}",
        suffix=".cu",
        prelude="".join(map(_text, ("prelude.h", "order.h"))),
        entry=_text("entry.h"),
        bodies=BODIES,
        ring="".join(map(_text, ("barriers.h", "ring.h"))),
        growth="".join(map(_text, ("growth.h", "stream_growth.h"))),
        stream=_text("stream.h"),
        roles=_text("roles.h"),
        loader=matrix_ring.loader,
        unstaged=SLABS_BYTES,
        joint_bodies=MAX_JOINT_BODIES,
        joint_products=MAX_JOINT_PRODUCTS,
        apart=APART,
    )
