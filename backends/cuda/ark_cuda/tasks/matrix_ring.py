"""The source that a kernel of the variant `matrix` needs besides its bodies: the ring of stages in
shared memory, the loading and the prefetching thread, and the moving warps.

Called by the writer through ark_cuda.dialect.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMPUTE, LOAD, MOVE
from ark.plan.kind import Signature
from ark_cuda.tasks import attention_boxed, products
from ark_cuda.tasks.stages import SLABS_BYTES, STAGES_BYTES

MOST_STAGES = 16
PREFETCH_PERIOD_STAGES = 4  # stages that memory delivers between two prefetches
MAX_PREFETCHED_STAGES = 16  # the most stages of weights that are prefetched to L2


def loader(signatures: Sequence[Signature], machine: Machine) -> str:
    """C++ source of the variant `matrix` for a plan: the ring's sizes, which suffice for all of its
    products, and the loops of the loading thread and the moving warps.
    """
    stage = max(
        (products.stage_bytes(s) for s in signatures if products.multiplies(s, machine)),
        default=STAGES_BYTES // 4,
    )
    if any(s.kind == "attention_tiles" for s in signatures):
        stage = STAGES_BYTES // 4  # four stages fit beside the queries of attention
    boxed = [attention_boxed.stage(s, machine) for s in signatures]
    stage = max(stage, *boxed, 0)
    stages = min(MOST_STAGES, STAGES_BYTES // stage)
    halved = (
        products.multiplies(s, machine) and products.height(s) == products.HEIGHTS[0]
        for s in signatures
    )
    if any(boxed) or any(halved):
        stages -= stages % 2  # each warpgroup uses half of the slots
    # Weights are prefetched to L2 if all products have few rows. A kernel that also reads prompts
    # has taller tiles, whose operands need L2 themselves.
    heights = {products.height(s) for s in signatures if products.multiplies(s, machine)}
    ahead = heights == {products.HEIGHTS[0]} and not machine.variant.role(MOVE)
    files = resources.files("ark_cuda")
    headers = ["barriers.h"]
    if machine.has(Capability.TCGEN05):
        headers.append("tensor_memory.h")
    if any(boxed):
        headers.append("growth.h")
    return (
        f"{''.join(files.joinpath(name).read_text() for name in headers)}"
        f"constexpr ark_u32 ARK_MATRIX_STAGES = {stages}u;\n"
        f"constexpr ark_u32 ARK_MATRIX_STAGE = {stage}u;\n"
        f"constexpr ark_u32 ARK_MATRIX_SLABS = {SLABS_BYTES}u;\n"
        f"constexpr ark_u32 ARK_MATRIX_AHEAD = {MAX_PREFETCHED_STAGES if ahead else 0}u;\n"
        f"constexpr ark_u32 ARK_MATRIX_PACE = {PREFETCH_PERIOD_STAGES}u;\n"
        f"constexpr int ARK_LOAD_REGISTERS = {machine.variant.registers(LOAD)};\n"
        f"constexpr int ARK_COMPUTE_REGISTERS = {machine.variant.registers(COMPUTE)};\n"
        f"{files.joinpath('matrix.h').read_text()}{files.joinpath('matrix_store.h').read_text()}"
    ) + (files.joinpath("movers.h").read_text() if machine.variant.role(MOVE) else "")
