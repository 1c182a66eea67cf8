"""Creates tensor maps, which describe matrices to the copy engine (TMA) of sm_90 and later.

Called by the device when a plan is loaded.
"""

from __future__ import annotations

from ark.backend.codegen.body import BoxMap
from ark.errors import SystemError
from ark.ir.dtype import by_name
from ark_cuda.driver import check, cu, struct_bytes
from ark_cuda.tasks.code_products import PLAIN_BYTES

MAP_BYTES = 128


def tensor_map(box: BoxMap, address: int) -> bytes:
    """Creates the tensor map of a box: a part of a matrix that TMA copies at once. address: the
    matrix's address. In shared memory, rows of a box have 128 bytes and are swizzled as wgmma reads
    them. Boxes of a matrix of bytes are not swizzled. Elements outside of the matrix are read as
    zero.

    Raises SystemError if the memory does not begin at a multiple of 16 bytes.
    """
    if address % 16:
        raise SystemError(
            f"a matrix of {box.dims[0]} columns is not aligned to 16 bytes, as tensor-map copies "
            "require; copy the tensor, or plan with the variant 'block'"
        )
    kinds = cu.CUtensorMapDataType
    wide = {
        "bf16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "fp16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        "fp32": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        PLAIN_BYTES: kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }
    bytewise = box.dtype not in wide and by_name(box.dtype).itemsize == 1
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8 if bytewise else wide[box.dtype]
    rank = len(box.dims)
    promotions = {
        128: cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        256: cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    }
    seen = (
        kind,
        rank,
        address,
        [cu.cuuint64_t(n) for n in box.dims],
        [cu.cuuint64_t(n) for n in box.strides],
    )
    sizes = [cu.cuuint32_t(n) for n in box.box]
    steps = [cu.cuuint32_t(n) for n in box.steps or (1,) * rank]
    form = (
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE
        if box.dtype == PLAIN_BYTES
        else cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        promotions[box.fetched],
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if box.steps:
        corners = list(box.lower), list(box.upper)
        code, encoded = cu.cuTensorMapEncodeIm2col(*seen, *corners, *sizes, steps, *form)
    else:
        code, encoded = cu.cuTensorMapEncodeTiled(*seen, sizes, steps, *form)
    check((code,), f"mapping a matrix of {box.dims} elements with rows of {box.strides} bytes")
    return struct_bytes(encoded, MAP_BYTES)
