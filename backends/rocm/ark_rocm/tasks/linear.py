"""Linear layers of one input row: all waves of a block share each task's weights evenly.

Serves decoding in the variant `block`: one row, weights of a type whose rows are whole 16-byte
loads. The body begins before its task's waits (Dialect.enters): what it reads then are weights that
nobody writes. Everything else is the common body's. linear.h has the device side. Called by the
writer through the dialect.
"""

from __future__ import annotations

from importlib import resources

from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.linear import epilogue, prologue

LOADS_AHEAD = 4  # of a wave, AHEAD of linear.h
_TYPES = ("fp32", "fp16", "bf16")


def _parts(sig: Signature, machine: Machine) -> int:
    """Loads of a wave that a row takes."""
    weight = sig.operands[1]
    return -(-sig.operands[0].shape[1] * weight.itemsize // (16 * machine.lanes))


def _rows(sig: Signature, machine: Machine) -> int:
    """Most rows that a task has."""
    rows = sig.params["rows"]
    stages = -(-sig.operands[1].shape[0] // rows)
    return -(-stages // machine.processors) * rows


def _bytes(sig: Signature, machine: Machine) -> int:
    """The input row, the parts' sums, and what reductions over the block take."""
    k = sig.operands[0].shape[1]
    sums = _rows(sig, machine) * _parts(sig, machine) + LOADS_AHEAD * machine.warps
    return 4 * (k + sums + 2 * machine.warps)


def serves(sig: Signature, machine: Machine) -> bool:
    """Whether this body takes the signature."""
    weight = sig.operands[1]
    return (
        machine.variant.name == "block"
        and sig.operands[0].shape[0] == sig.operands[2].shape[0] == 1
        and sig.params["split_k"] == 1
        and weight.dtype in _TYPES
        and weight.shape[1] * weight.itemsize % 16 == 0
        and _bytes(sig, machine) <= machine.shared_bytes
    )


def headers(machine: Machine) -> tuple[str, ...]:
    """The device code that `write` instantiates."""
    return ((resources.files("ark_rocm") / "tasks/linear.h").read_text(),)


def scratch(sig: Signature, machine: Machine) -> int:
    """Shared memory of a task in bytes, 0 where the common body serves."""
    return _bytes(sig, machine) if serves(sig, machine) else 0


def write(name: str, sig: Signature, machine: Machine) -> str | None:
    """The body's source, or None where the common body serves."""
    if not serves(sig, machine):
        return None
    k = sig.operands[0].shape[1]
    constants = (
        sig.operands[1].ctype,
        k,
        _parts(sig, machine),
        _rows(sig, machine),
    )
    weights = f"{text.given(sig, 1)}.p"
    operands = (weights, text.given(sig, 0), prologue(sig), epilogue(sig))
    call = text.called("ark_linear_split", constants, operands)
    return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"
