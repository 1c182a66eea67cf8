"""Products on a CPU. Both matrices are packed into panels, which the processor's widest units
multiply: tile registers, dot products of bf16 or int8, or vectors of floats, depending on what the
compiler may use (dots.h, panels.h). Tiles of few rows are computed by the device function that
works on every machine. Called through the dialect.
"""

from __future__ import annotations

from importlib import resources

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.matmul_form import dims, k_range, pair_distance, side_strides
from ark.tasks.matmul_params import MatmulParams
from ark.tasks.matmul_text import MIN_PACKED_ROWS, each_tile, finish_text, outputs, places

_PART_BYTES = 1024  # bytes along k of a row or a column in a panel
_MAX_PANEL_ELEMENTS = 64  # by which a tile grows at most if it is padded to whole panels


class Panels(Body):
    kind = "matmul"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        params = sig.read(MatmulParams)
        return not params.reads_images and params.tile[0] >= MIN_PACKED_ROWS

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        steps = (step for index in (0, 1) for step in side_strides(sig, index))
        sizes = (*sig.read(MatmulParams).tile, *dims(sig)[:2])
        constants = (*sizes, _PART_BYTES, pair_distance(sig), *steps)
        arguments = ("m0", "n0", *k_range(sig), *places(sig), finish_text(sig))
        body = f"  {text.called('ark_matmul_panels', constants, arguments)};\n"
        return text.function(name, outputs(sig) + each_tile(sig, body))

    def headers(self, machine: Machine) -> tuple[str, ...]:
        folder = resources.files("ark_cpu.tasks")
        return tuple(folder.joinpath(name).read_text() for name in ("dots.h", "panels.h"))

    def scratch(self, sig: Signature, machine: Machine) -> int:
        rows, columns = (n + _MAX_PANEL_ELEMENTS for n in sig.read(MatmulParams).tile)
        return 4 * rows * columns + _PART_BYTES * (rows + columns)
