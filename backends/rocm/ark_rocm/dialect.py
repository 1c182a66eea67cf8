"""The loop kernel in HIP C++ for one AMD architecture. Called by ark_rocm.__init__."""

from __future__ import annotations

from importlib import resources

from ark.backend.codegen.dialect import Dialect
from ark_rocm import machines
from ark_rocm.tasks import BODIES

PRELUDE = ("prelude.h", "lanes.h", "order.h", "arithmetic.h", "dots.h", "queue.h")


def _text(name: str) -> str:
    return (resources.files("ark_rocm") / name).read_text()


def dialect(arch: str) -> Dialect:
    """The dialect for `arch`. Raises UnsupportedError if this backend does not support the
    architecture.
    """
    ticks = f"constexpr unsigned ARK_TICKS_NS = {machines.describe(arch).tick_ns};\n"
    return Dialect(
        name="rocm",
        suffix=".hip",
        prelude=ticks + "".join(map(_text, PRELUDE)),
        entry=_text("entry.h"),
        bodies=BODIES,
    )
