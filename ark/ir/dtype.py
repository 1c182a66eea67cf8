"""The data types of tensors: their names for users, and how elements are stored in memory.

Two elements of a 4-bit type share a byte; the first is in the low half. Rows (along the last
dimension of a buffer) begin at whole bytes. In NumPy each such element takes a byte, as in
ml_dtypes. 8-bit floats are those of the Open Compute Project (OCP) on every vendor.

A quantised matrix has a `RowType`: each row is one item that contains the codes of all columns and
their scales.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from ark.errors import InvalidUsageError, UnsupportedError

if TYPE_CHECKING:
    import torch
    from numpy.typing import DTypeLike


@dataclass(frozen=True)
class DataType:
    """An element type. bits: size of an element. storage: the C type of the device ABI in which
    elements are stored. rounding: the function of the device ABI that rounds a float to this type;
    "" for fp32 and for integers. torch_name: the name of torch's type; "" if torch has none.
    largest: for types of codes of quantised matrices, the code to which the largest value of a
    group is scaled; for other types 0.0.

    Examples:
        >>> ark.bf16.bits, ark.int4.nbytes(3)
        (16, 2)
    """

    name: str
    bits: int
    storage: str
    numpy: type[np.generic]
    rounding: str = field(default="", kw_only=True)
    torch_name: str = field(default="", kw_only=True)
    largest: float = field(default=0.0, kw_only=True)

    def __repr__(self) -> str:
        return f"ark.{self.name}"

    @property
    def packed(self) -> bool:
        """True if several elements share a byte."""
        return self.per_item > 1

    @property
    def itemsize(self) -> int:
        """Bytes of the smallest addressable unit: an element, or the byte that elements share."""
        return max(1, self.bits // 8)

    @property
    def per_item(self) -> int:
        """Elements of the smallest addressable unit: 1, or 2 for 4-bit types."""
        return max(1, 8 // self.bits)

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` consecutive elements, the first of which begins at a whole byte."""
        return -(-elements // self.per_item) * self.itemsize

    def host_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the NumPy array that holds a tensor of the given shape."""
        return tuple(shape)

    def whole_rows(self, extents: Sequence[int]) -> tuple[int, ...]:
        """A buffer's sizes, the last one rounded up so that every row begins at a whole item."""
        if not self.packed or not extents:
            return tuple(extents)
        return (*extents[:-1], -(-extents[-1] // self.per_item) * self.per_item)

    def element_size(self) -> int | Fraction:
        """Bytes per element: a whole number, or Fraction(1, 2) for types of 4 bits."""
        size = Fraction(self.itemsize, self.per_item)
        return int(size) if size.denominator == 1 else size

    def to_numpy(self) -> type[np.generic]:
        """The NumPy scalar type; ml_dtypes.bfloat16 for bf16."""
        return self.numpy

    def to_torch(self) -> torch.dtype:
        """The torch dtype; UnsupportedError if torch is not installed or has none."""
        try:
            import torch
        except ImportError as error:
            raise UnsupportedError(
                "torch is not installed; install it with `pip install ark-gpu[torch]`"
            ) from error
        if not self.torch_name:
            raise UnsupportedError(f"torch has no type for ark.{self.name}; ark.cast it")
        dtype: torch.dtype = getattr(torch, self.torch_name)
        return dtype

    def ctype(self) -> DataType:
        """Returns the type itself. ARK's core gives its types different names (ark.core.FP32, ...),
        which are the same objects here.
        """
        return self

    @staticmethod
    def from_name(type_name: str) -> DataType:
        """The data type of that name; InvalidUsageError if ark has none."""
        return by_name(type_name)

    @staticmethod
    def from_numpy(np_type: DTypeLike) -> DataType:
        """The data type of a NumPy dtype; InvalidUsageError if ark has none."""
        try:
            wanted = np.dtype(np_type)
        except TypeError as error:
            raise InvalidUsageError(f"{np_type!r:.60} is not a NumPy dtype: {error}") from error
        for candidate in ALL:
            if np.dtype(candidate.numpy) == wanted:
                return candidate
        raise InvalidUsageError(
            f"NumPy dtype {wanted} has no ark data type; cast it to one of {_names()}"
        )

    @staticmethod
    def from_torch(torch_type: torch.dtype) -> DataType:
        """The data type of a torch dtype; InvalidUsageError if ark has none."""
        wanted = str(torch_type).removeprefix("torch.")
        for candidate in ALL:
            if candidate.torch_name == wanted:
                return candidate
        raise InvalidUsageError(
            f"torch dtype {torch_type} has no ark data type; cast to one of {_names()}"
        )

    @staticmethod
    def from_ctype(ctype: DataType) -> DataType:
        """Returns the data type for a type of ARK's core, which is the same object; see `ctype`."""
        if not isinstance(ctype, DataType):
            raise InvalidUsageError(f"{ctype!r} is not a type of ark.core; pass ark.fp32.ctype()")
        return ctype


@dataclass(frozen=True, repr=False)
class RowType(DataType):
    """The type of a matrix whose rows are codes with scales: value = scale * (code - zero).

    codes: the element type of the codes. columns: the number of columns of the matrix. group: the
    number of neighbouring columns that share a scale and a zero. scales: the type of scales and
    zeros. zeros: True if rows contain zeros; otherwise zero is 0 in the formula. values: the
    floating-point type to which values are rounded when the matrix is dequantised.

    In memory a row is its codes, then a scale for each group, then (if there are zeros) a zero for
    each group, then padding to a multiple of 16 bytes. Eight 4-bit codes fill 32 bits: the codes of
    even columns are in the low half. In NumPy, a row is an array of its bytes.
    """

    codes: DataType
    columns: int
    group: int
    scales: DataType
    zeros: bool
    values: DataType

    @property
    def groups(self) -> int:
        """The number of groups of a row, each of which has one scale."""
        return self.columns // self.group

    @property
    def scales_at(self) -> int:
        """The offset of the scales in a row, in bytes."""
        return self.codes.nbytes(self.columns)

    @property
    def zeros_at(self) -> int:
        """The offset of the zero points in a row, in bytes. If the type has no zero points, the
        offset of the padding.
        """
        return self.scales_at + self.scales.nbytes(self.groups)

    @property
    def itemsize(self) -> int:
        """Bytes of a row."""
        end = self.zeros_at + (self.scales.nbytes(self.groups) if self.zeros else 0)
        return -(-end // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def per_item(self) -> int:
        """Elements of a row."""
        return self.columns

    def host_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the NumPy array that holds a tensor of the given shape. In its last
        dimension, a row takes as many elements as it has bytes.
        """
        return (*shape[:-1], shape[-1] // self.columns * self.itemsize)


fp32 = DataType("fp32", 32, "float", np.float32, torch_name="float32")
fp16 = DataType("fp16", 16, "ark_f16", np.float16, torch_name="float16", rounding="ark_half")
bf16 = DataType(
    "bf16", 16, "ark_bf16", ml_dtypes.bfloat16, torch_name="bfloat16", rounding="ark_bfloat"
)
fp8_e4m3 = DataType(
    *("fp8_e4m3", 8, "ark_e4m3", ml_dtypes.float8_e4m3fn),
    torch_name="float8_e4m3fn",
    rounding="ark_to_e4m3",
    largest=448.0,
)
fp8_e5m2 = DataType(
    *("fp8_e5m2", 8, "ark_e5m2", ml_dtypes.float8_e5m2),
    torch_name="float8_e5m2",
    rounding="ark_to_e5m2",
)
int64 = DataType("int64", 64, "ark_i64", np.int64, torch_name="int64")
int32 = DataType("int32", 32, "ark_i32", np.int32, torch_name="int32")
uint32 = DataType("uint32", 32, "ark_u32", np.uint32, torch_name="uint32")
int8 = DataType("int8", 8, "signed char", np.int8, torch_name="int8", largest=127.0)
uint8 = DataType("uint8", 8, "unsigned char", np.uint8, torch_name="uint8")
byte = DataType("byte", 8, "unsigned char", np.uint8, torch_name="uint8")
bool_ = DataType("bool", 8, "bool", np.bool_, torch_name="bool")
int4 = DataType("int4", 4, "ark_int4", ml_dtypes.int4, largest=7.0)
uint4 = DataType("uint4", 4, "ark_uint4", ml_dtypes.uint4)
fp4 = DataType("fp4", 4, "ark_fp4", ml_dtypes.float4_e2m1fn)

FLOATS = (fp32, fp16, bf16)  # types with which every op computes
SMALL_FLOATS = (fp8_e4m3, fp8_e5m2)  # types that can be stored, moved, cast and multiplied
INTEGERS = (int64, int32, uint32, int8, uint8, byte)
PACKED = (int4, uint4, fp4)
ALL = (*FLOATS, *SMALL_FLOATS, *INTEGERS, bool_, *PACKED)
INDICES = (int32, int64)
CODES = (*PACKED, int8, uint8, *SMALL_FLOATS)  # element types of quantised matrices
FLOAT_CODES = fp8_e4m3  # the 8-bit floating-point codes of checkpoints and caches
CACHE_CODES = (int8, FLOAT_CODES)  # element types of quantised keys and values

ROW_ALIGNMENT = 16  # the alignment of the rows of a RowType, in bytes
CODE_STEP = 8  # a group is a multiple of this many columns


def _names() -> str:
    return ", ".join(t.name for t in ALL)


@cache
def row_type(
    codes: DataType, columns: int, group: int, scales: DataType, zeros: bool, values: DataType
) -> RowType:
    """The RowType with these fields. Raises InvalidUsageError if a row does not consist of whole
    groups, a group is not a multiple of CODE_STEP columns, or a type is not allowed for its field.
    """
    fits = columns > 0 and group > 0 and columns % group == 0 == group % CODE_STEP
    if not fits or codes not in CODES or scales not in FLOATS or values not in FLOATS:
        raise InvalidUsageError(
            f"rows of {columns} {codes.name} in groups of {group} with scales of {scales.name}, "
            f"dequantised to {values.name}, cannot be stored; expected groups of a multiple of "
            f"{CODE_STEP} that divide a row, codes of {', '.join(t.name for t in CODES)}, and "
            "scales and values of fp32, fp16 or bf16"
        )
    has = "_zeros" if zeros else ""
    name = f"{codes.name}_k{columns}_g{group}_{scales.name}{has}_as_{values.name}"
    fields = (codes.storage, columns, group, scales.storage, str(zeros).lower())
    storage = f"ArkRow<{', '.join(map(str, fields))}>"
    return RowType(
        name, codes.bits, storage, np.uint8, codes, columns, group, scales, zeros, values
    )


def cache_type(codes: str, width: int, values: DataType) -> RowType:
    """The type of a quantised cache: each row of `width` elements is codes with one scale. codes:
    the name of their type, int8 or fp8_e4m3. values: the type of an unquantised cache.
    """
    if width % CODE_STEP:
        raise InvalidUsageError(
            f"a cache of {codes} has rows of a multiple of {CODE_STEP} elements, got {width}; keep "
            f"keys and values in {values.name}"
        )
    return row_type(by_name(codes), width, width, fp32, False, values)


def value_type(dtype: DataType) -> DataType:
    """The floating-point type with which elements are multiplied."""
    return dtype.values if isinstance(dtype, RowType) else dtype


_FLOAT = "(fp32|fp16|bf16)"
ROW_NAME = rf"(\w{{1,16}})_k([1-9]\d{{0,8}})_g([1-9]\d{{0,8}})_{_FLOAT}(_zeros)?_as_{_FLOAT}"


@cache
def by_name(name: str) -> DataType:
    """The data type called `name`; InvalidUsageError if there is none."""
    for candidate in ALL:
        if candidate.name == name:
            return candidate
    match = re.fullmatch(ROW_NAME, name)
    if match is not None:
        codes, columns, group, scales, zeros, values = match.groups()
        types = (by_name(codes), int(columns), int(group), by_name(scales), bool(zeros))
        return row_type(*types, by_name(values))
    raise InvalidUsageError(f"the data type {name!r} does not exist; choose one of {_names()}")
