"""Data types, as users name them and as kernels store them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ark.errors import InvalidUsageError, UnsupportedError


@dataclass(frozen=True)
class DataType:
    """An element type. storage: the type that the device ABI stores it as."""

    name: str
    itemsize: int
    storage: str
    numpy: Any

    def __repr__(self) -> str:
        return f"ark.{self.name}"

    def element_size(self) -> int:
        """Bytes per element."""
        return self.itemsize

    def to_numpy(self) -> Any:
        """The NumPy scalar type; ml_dtypes.bfloat16 for bf16."""
        return self.numpy

    def to_torch(self) -> Any:
        """The torch dtype; UnsupportedError if torch is not installed."""
        try:
            import torch
        except ImportError as error:
            raise UnsupportedError(
                "torch is not installed; install it with `pip install ark-gpu[torch]`"
            ) from error
        return getattr(torch, _TORCH[self.name])

    def ctype(self) -> DataType:
        """What ARK's core calls the type (ark.core.FP32, ...): the type itself."""
        return self

    @staticmethod
    def from_name(type_name: str) -> DataType:
        """The data type of that name; InvalidUsageError if ark has none."""
        return by_name(type_name)

    @staticmethod
    def from_numpy(np_type: Any) -> DataType:
        """The data type of a NumPy dtype; InvalidUsageError if ark has none."""
        wanted = np.dtype(np_type)
        for candidate in ALL:
            if np.dtype(candidate.numpy) == wanted:
                return candidate
        raise InvalidUsageError(
            f"NumPy dtype {wanted} has no ark data type; cast it to one of {_names()}"
        )

    @staticmethod
    def from_torch(torch_type: Any) -> DataType:
        """The data type of a torch dtype; InvalidUsageError if ark has none."""
        wanted = str(torch_type).removeprefix("torch.")
        for name, torch_name in _TORCH.items():
            if torch_name == wanted:
                return by_name(name)
        raise InvalidUsageError(
            f"torch dtype {torch_type} has no ark data type; cast to one of {_names()}"
        )

    @staticmethod
    def from_ctype(ctype: DataType) -> DataType:
        """The data type that ARK's core calls so; see `ctype`."""
        if not isinstance(ctype, DataType):
            raise InvalidUsageError(f"{ctype!r} is no type of ark.core; pass ark.fp32.ctype()")
        return ctype


fp32 = DataType("fp32", 4, "float", np.float32)
fp16 = DataType("fp16", 2, "ark_f16", np.float16)
bf16 = DataType("bf16", 2, "ark_bf16", ml_dtypes.bfloat16)
int32 = DataType("int32", 4, "ark_i32", np.int32)
uint32 = DataType("uint32", 4, "ark_u32", np.uint32)
int8 = DataType("int8", 1, "signed char", np.int8)
uint8 = DataType("uint8", 1, "unsigned char", np.uint8)
byte = DataType("byte", 1, "unsigned char", np.uint8)

ALL = (fp32, fp16, bf16, int32, uint32, int8, uint8, byte)
FLOATS = (fp32, fp16, bf16)

_TORCH = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "int32": "int32",
    "uint32": "uint32",
    "int8": "int8",
    "uint8": "uint8",
}


def _names() -> str:
    return ", ".join(t.name for t in ALL)


def by_name(name: str) -> DataType:
    """The data type called `name`; InvalidUsageError if there is none."""
    for candidate in ALL:
        if candidate.name == name:
            return candidate
    raise InvalidUsageError(f"no data type is called {name!r}; ark has {_names()}")
