"""How many bytes and vectors a thread of an elementwise device function loads before it uses any of
them. Used by ark.tasks.box_writer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ark.machine import Machine
from ark.plan.kind import Signature

THREAD_BYTES_IN_FLIGHT = 128  # bytes of loads that a thread has in flight
MAX_NEAR_BYTES = 16384  # of a broadcast operand that stays in the nearest cache
MAX_HELD_BYTES = 320  # of loaded vectors in a thread's registers, in the variant `matrix`


def vectors_in_flight(
    sig: Signature,
    read: Sequence[int],
    first_output: int,
    vector: int,
    least: int,
    placed: Collection[int],
    machine: Machine,
) -> int:
    """The number of vectors of each input that a thread has in flight. read: the operands that are
    loaded; from first_output on they are outputs. vector: its elements. least: bytes that count at
    least for a vector of all inputs. placed: operands that are not read at the result's indices.

    The threads of the variant `matrix` have registers for more vectors. So small operands do not
    count there, whose loads are short because they are read again and again.
    """
    inputs = [i for i in read if i < first_output]
    loaded = vector * sum(sig.operands[i].itemsize for i in inputs)
    if vector == 1 or machine.variant.name != "matrix":
        return THREAD_BYTES_IN_FLIGHT // max(least, loaded)
    far = [i for i in inputs if i in placed or not _near(sig, i)]
    waited = vector * sum(sig.operands[i].itemsize for i in far)
    return min(THREAD_BYTES_IN_FLIGHT // max(least, waited), MAX_HELD_BYTES // max(1, loaded))


def _near(sig: Signature, index: int) -> bool:
    """True for a small operand that is broadcast to the result."""
    operand, out = sig.operands[index], sig.operands[-1]
    elements = math.prod(operand.shape)
    return elements * operand.itemsize <= MAX_NEAR_BYTES and elements < math.prod(out.shape)
