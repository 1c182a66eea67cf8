"""all_reduce under two further names that ARK (microsoft/ark) has: all_reduce_packet and
all_reduce_prefill.
"""

from __future__ import annotations

from ark.errors import ModelError
from ark.frontend.tensor import Output, Tensor, TensorLike
from ark.ir.export import PREFILL, arks_name
from ark.ops.communication.collectives import one_shot, placed, summable


def all_reduce_packet(
    input: TensorLike, rank: int, world_size: int, output: Output = None, name: str = ""
) -> Tensor:
    """The same as all_reduce, under a name of ARK (microsoft/ark).

    The planner chooses how data are transferred. Arguments, types and errors as for all_reduce.

    Examples:
        >>> with ark.use_model(ark.Model(0, 2)):
        ...     shape = ark.all_reduce_packet(ark.tensor([8, 3]), rank=0, world_size=2).shape()
        ...
        >>> shape
        [8, 3]
    """
    tensor = placed("all_reduce_packet", input, rank, world_size)
    summable("all_reduce_packet", tensor)
    return one_shot(tensor, output, name or "all_reduce_packet", packet=True)


def all_reduce_prefill(
    input: TensorLike, rank: int, world_size: int, output: Output = None, name: str = ""
) -> Tensor:
    """The same as all_reduce, under a name of ARK (microsoft/ark), for one size.

    The input has 2048 * 4096 elements of fp16, and there are 2 to 8 ranks. `output` may be the
    input. Raises ModelError for other sizes, types or numbers of ranks, as ARK does.

    Examples:
        >>> with ark.use_model(ark.Model(0, 2)):
        ...     x = ark.tensor([2048, 4096], ark.fp16)
        ...     shape = ark.all_reduce_prefill(x, rank=0, world_size=2).shape()
        ...
        >>> shape
        [2048, 4096]
    """
    tensor = placed("all_reduce_prefill", input, rank, world_size)
    if arks_name(tensor.ir, world_size) != PREFILL:
        raise ModelError(
            f"{PREFILL} needs {2048 * 4096} fp16 elements on 2 to 8 ranks, but got "
            f"{tensor.ir.elements} of {tensor.ir.dtype.name} on {world_size}; use ark.all_reduce"
        )
    return one_shot(tensor, output, name or PREFILL, packet=True)
