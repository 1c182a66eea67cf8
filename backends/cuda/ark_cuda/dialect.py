"""The source dialect of NVIDIA GPUs: prelude, ring, entry point and the vendor's task bodies.

Called by the writer through the backend object. The dialect's text is the same for every
architecture; the machine's capabilities describe an architecture's features.
"""

from __future__ import annotations

from importlib import resources

from ark.codegen.dialect import Dialect
from ark_cuda.tasks import BODIES, products

# Bodies are compiled separately. In one program, a body's registers and stack frame would depend on
# all callers in the kernel, and the compile time would grow with the square of the number of
# bodies.
MAX_JOINT_BODIES = 16
# Products by wgmma are inlined into one function. 28 of them compile in 40 s of CPU time, 87 in
# more than 300 s.
MAX_JOINT_PRODUCTS = 16
# In one program with a combine, a product gets so few registers that it spills in each step of k.
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
        stream="".join(
            map(_text, ("barriers.h", "ring.h", "prefetch.h", "in_flight.h", "stream.h"))
        ),
        roles=_text("roles.h"),
        loader=products.loader,
        unstaged=products.SLABS,
        joint_bodies=MAX_JOINT_BODIES,
        joint_products=MAX_JOINT_PRODUCTS,
        apart=APART,
    )
